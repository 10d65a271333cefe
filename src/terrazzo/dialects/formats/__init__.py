"""The dialects, a folder for each. None imports another.

A folder has `keys` (a row for every key), `read`, `write` and `findings` (combinations of keys that are refused), and
`dialect`, whose `DIALECT` is the record of these functions: what `registry` has by the dialect's name.

    shared             what several of them say alike
    deepspeed, fsdp1   those whose documents stand inside of others'
    nested             these documents, for the dialects that carry them
    accelerate, fsdp2, lightning, megatron, terrazzo, torchtitan, trainer   the others
"""
