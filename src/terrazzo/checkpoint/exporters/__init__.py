"""Checkpoints for other programs, one module for each format.

Every exporter reads a `Source` in one process, a piece of one tensor at a time, into a new folder that appears when it
is complete. They are imported where they are needed: torch.distributed.checkpoint takes a second.

    huggingface  a model folder of transformers
    dcp          a folder of torch.distributed.checkpoint

Without a checkpoint, of a model that ranks hold:

    pretrained   such a model folder: `tz.save_pretrained`
    full_state   its state dict on one rank: `tz.full_state_dict`

What they share:

    new_folder   a folder that appears when it is complete
"""
