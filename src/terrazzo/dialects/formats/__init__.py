"""The dialects, a folder for each. None imports another; each is a `Dialect`, which `registry` has by its name.

A folder has `dialect` (the class), `keys` (a row for every key), `read`, `write`, and `findings` where combinations of
keys are refused.

    shared             what several of them say alike
    deepspeed, fsdp1   those whose documents stand inside of others'
    nested             these documents, for the dialects that carry them
    accelerate, fsdp2, lightning, megatron, terrazzo, torchtitan, trainer   the others
"""
