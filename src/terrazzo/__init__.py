"""Terrazzo: one sharded-training engine for PyTorch.

    import terrazzo as tz

    model, optimizer = tz.shard(model, optimizer, plan="zero3", precision="bf16")

Every ZeRO stage and FSDP strategy is a row of one table; see `tz.Plan`. What a run takes is known before: `tz.plan`.
"""

from terrazzo import tether  # noqa: F401  first: it notes who the parent is, before seconds of imports

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from terrazzo import checkpoint
from terrazzo.engine import (
    LossScaling,
    Offload,
    Place,
    Plan,
    Precision,
    accumulate,
    attach,
    clip_grad_norm_,
    gathered,
    shard,
)
from terrazzo.errors import BadInput, Damaged, Diverged, Misuse, RanksApart, SaveFailed, SwapFailed, TerrazzoError

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
    "RanksApart",
    "SaveFailed",
    "SwapFailed",
    "TerrazzoError",
    "__version__",
    "accumulate",
    "attach",
    "checkpoint",
    "clip_grad_norm_",
    "fully_shard",
    "gathered",
    "initialize",
    "plan",
    "shard",
]


_LAZY = {
    "fully_shard": "terrazzo.integrations.fsdp2",
    "initialize": "terrazzo.integrations.deepspeed",
    "plan": "terrazzo.planner.api",
}
"""Names imported when they are first asked for, and the modules that have them: training does not need them."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
