"""Lightning's Trainer on Terrazzo's engine.

strategy    what the Trainer asks of a strategy
root        the root around a LightningModule
checkpoint  its checkpoints, with the Trainer's own state beside the tensors
"""
