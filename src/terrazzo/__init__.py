"""Terrazzo: one sharded-training engine for PyTorch.

    import terrazzo as tz

    model, optimizer = tz.shard(model, optimizer, plan="zero3", precision="bf16")

Every ZeRO stage and FSDP strategy is a row of one table; see `tz.Plan`. What a run takes is known before: `tz.plan`.
"""

from terrazzo import tether  # noqa: F401  first: it notes who the parent is, before seconds of imports

# isort: split
from typing import TYPE_CHECKING, Any

from terrazzo import checkpoint, ending  # noqa: F401  how a process ends that has this package
from terrazzo.errors import (
    BadInput,
    Corrupted,
    Damaged,
    Diverged,
    Misuse,
    RanksApart,
    SaveFailed,
    SwapFailed,
    TerrazzoError,
)
from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo import nn, optim, parallel, telemetry
    from terrazzo.engine import (
        EMA,
        DiLoCo,
        LossScaling,
        Offload,
        Place,
        Plan,
        Precision,
        accumulate,
        attach,
        clip_grad_norm_,
        gathered,
        register_forward_method,
        shard,
    )
    from terrazzo.parallel import Pipeline, parallelize, step
    from terrazzo.parallel.mesh import mesh
    from terrazzo.planner.api import plan

    full_state_dict: Any
    fully_shard: Any
    initialize: Any
    save_pretrained: Any
else:
    __getattr__ = lazily(
        __name__,
        {
            "terrazzo.engine": (
                *("EMA", "DiLoCo", "LossScaling", "Offload", "Place", "Plan", "Precision"),
                *("accumulate", "attach", "clip_grad_norm_", "gathered", "register_forward_method", "shard"),
            ),
            "terrazzo.integrations.deepspeed": ("initialize",),
            "terrazzo.integrations.fsdp2": ("fully_shard",),
            "terrazzo.checkpoint.exporters.pretrained": ("save_pretrained",),
            "terrazzo.checkpoint.exporters.full_state": ("full_state_dict",),
            "terrazzo.nn": ("nn",),
            "terrazzo.optim": ("optim",),
            "terrazzo.parallel": ("Pipeline", "parallel", "parallelize", "step"),
            "terrazzo.parallel.mesh": ("mesh",),
            "terrazzo.planner.api": ("plan",),
            "terrazzo.telemetry": ("telemetry",),
        },
    )

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "BadInput",
    "Corrupted",
    "Damaged",
    "DiLoCo",
    "Diverged",
    "LossScaling",
    "Misuse",
    "Offload",
    "Pipeline",
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
    "full_state_dict",
    "fully_shard",
    "gathered",
    "initialize",
    "mesh",
    "nn",
    "optim",
    "parallel",
    "parallelize",
    "plan",
    "register_forward_method",
    "save_pretrained",
    "shard",
    "step",
    "telemetry",
]
