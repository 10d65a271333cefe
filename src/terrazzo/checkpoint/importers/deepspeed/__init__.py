"""DeepSpeed's folders, of every stage, sharded or not, universal ones too.

In reading order:

    files       the files of a folder: which there are, which there should be
    trained     an optimizer beside its tensors: name, param groups, loss scaler
    flat        parameters in the flat tensors of the ZeRO stages
    unsharded   stage 0 in bf16 or fp16: fp32 weights without their names
    tensor      tensor parallelism: how the parts of ranks fit together
    universal   the universal format: a folder for each parameter
    checkpoint  the checkpoint that a reader opens, made of those above
"""

from terrazzo.checkpoint.importers.deepspeed.checkpoint import DeepSpeedCheckpoint, recognises

__all__ = ["DeepSpeedCheckpoint", "recognises"]
