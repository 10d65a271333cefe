"""Terrazzo: one sharded-training engine for PyTorch.

    import terrazzo as tz

    model, optimizer = tz.shard(model, optimizer, plan="zero3", precision="bf16")

Every ZeRO stage and FSDP strategy is a row of one table; see `tz.Plan`. What a run takes is known before: `tz.plan`.
"""

from typing import TYPE_CHECKING, Any

from terrazzo import checkpoint
from terrazzo.engine import (
    LossScaling,
    Offload,
    Place,
    Plan,
    Precision,
    accumulate,
    clip_grad_norm_,
    gathered,
    shard,
)
from terrazzo.errors import BadInput, Damaged, Diverged, Misuse, SaveFailed, SwapFailed, TerrazzoError

if TYPE_CHECKING:
    from terrazzo.planner.api import plan

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "Damaged",
    "Diverged",
    "LossScaling",
    "Misuse",
    "Offload",
    "Place",
    "Plan",
    "Precision",
    "SaveFailed",
    "SwapFailed",
    "TerrazzoError",
    "__version__",
    "accumulate",
    "checkpoint",
    "clip_grad_norm_",
    "gathered",
    "plan",
    "shard",
]


def __getattr__(name: str) -> Any:
    """`plan` is imported when it is first asked for: training does not need it."""
    if name == "plan":
        from terrazzo.planner.api import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
