"""DeepSpeed's folders, of every stage, sharded or not, universal ones too."""

from terrazzo.checkpoint.importers.deepspeed.checkpoint import DeepSpeedCheckpoint, recognises

__all__ = ["DeepSpeedCheckpoint", "recognises"]
