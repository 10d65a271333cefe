"""Terrazzo: one sharded-training engine for PyTorch.

    import terrazzo as tz

    model, optimizer = tz.shard(model, optimizer, plan="zero3", precision="bf16")

Every ZeRO stage and FSDP strategy is a row of one table; see `tz.Plan`.
"""

from terrazzo import checkpoint
from terrazzo.engine import (
    LossScaling,
    Place,
    Plan,
    Precision,
    accumulate,
    clip_grad_norm_,
    gathered,
    shard,
)
from terrazzo.errors import BadInput, Damaged, Diverged, Misuse, SaveFailed, TerrazzoError

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Damaged",
    "Diverged",
    "LossScaling",
    "Misuse",
    "Place",
    "Plan",
    "Precision",
    "SaveFailed",
    "TerrazzoError",
    "__version__",
    "accumulate",
    "checkpoint",
    "clip_grad_norm_",
    "gathered",
    "shard",
]
