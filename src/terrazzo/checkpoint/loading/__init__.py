"""From a folder of any format to a sharded model.

load                 `tz.checkpoint.load`: opened, compared, then element ranges in the place of what is there
misfits              every difference from the model and its optimizer, before anything is changed
terrazzo_checkpoint  Terrazzo's own checkpoints as a `Source`
weights              full weights as a mapping
"""
