"""What Accelerate and the Trainer on it share: axes, and the precision that they train in, by what stands under it.

What a word such as `bf16: true` means depends on the stack: Accelerate lifts trainable FSDP parameters to fp32 before
they are sharded, and gathers and reduces in 16 bits; under DDP, weights keep the dtype in which the model was loaded.
In both it runs the forward under autocast and returns fp32. transformers' own sharding keeps the loaded dtype, and
reduces in fp32.
"""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, LOADED, PARAMETER_DTYPES, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.formats.shared.fsdp_policy import load_dtype
from terrazzo.engine import LossScaling
from terrazzo.words import DTYPE_SPELLINGS

__all__ = ["AUTOCAST", "AXES", "stack_precision", "stays_as_loaded", "write_replica_axes"]

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""Axes of the mesh that a `ParallelismConfig` has a size for."""

AUTOCAST = "Accelerate runs the forward under autocast: norms, softmax and losses compute in fp32"


def stays_as_loaded(wanted: str) -> str:
    """What becomes of a state that is to be in `wanted`, where it has the dtype in which the model is loaded."""
    edit = f"load it in {wanted}" if wanted in DTYPE_SPELLINGS else f"no setting makes it {wanted}"
    return f"it has the dtype in which the model is loaded: {edit}"


def stack_precision(stack: str, half: Setting[Any], deferred: bool, context: ReadingContext) -> SettingsByPath:
    """The dtype of every state.

    Args:
        stack: `fsdp1`, `fsdp2`, `ddp`, or `native` for transformers' own sharding.
        half: `bf16`, `fp16` or None, with its key.
        deferred: gradients of several micro-batches are summed before they are reduced.
    """
    as_loaded = load_dtype(context, False)
    row = dict.fromkeys(PARAMETER_DTYPES, as_loaded)
    if half.value is not None:
        row |= {"compute": half.value}
        if stack in ("fsdp1", "fsdp2"):
            lifted = dict.fromkeys(("weight", "master", "moments", "saved"), "fp32")
            row |= {**lifted, "reduce": half.value, "accumulate": half.value if deferred else "fp32"}
        elif stack == "native":
            row |= {"reduce": "fp32", "accumulate": "fp32"}
    settings = {f"precision.{state}": Setting(value, "default") for state, value in row.items()}
    for state in ("compute", "reduce"):
        if half.value is not None:
            settings[f"precision.{state}"] = Setting(row[state], half.origin, half.key)
    scaled = LossScaling() if half.value == "fp16" else None
    accelerated = stack != "native" and half.value is not None  # prepare_model() wraps the forward
    return {
        **settings,
        "precision.buffers": Setting(half.value if stack == "fsdp1" and half.value else LOADED, "default"),
        "precision.autocast": Setting(accelerated, half.origin, half.key),
        "precision.loss_scaling": Setting(scaled, half.origin, half.key),
        **({"precision.output": Setting("fp32", "default")} if accelerated else {}),
    }


_INSTEAD = {
    "tp": "Accelerate refuses it beside plain replicas: take a row that splits, such as zero3",
    "cp": "Accelerate shares sequences under FSDP alone: take a row that splits, such as zero3",
    "sp": "Accelerate splits sequences by Ulysses under DeepSpeed alone",
}


def write_replica_axes(draft: Draft, tp: str, world: int | None) -> None:
    """The axes where nothing is split: all ranks are replicas, or all share one model by `tp`, the key of its size."""
    alone = ranks_left(draft.description, world, SAME_DATA_AXES) == 1
    for axis, why in _INSTEAD.items():
        size = draft.value(f"mesh.{axis}", 1)
        if size != 1 and axis == "tp" and alone:
            draft.put("mesh.tp", tp, size, "the model is loaded with tp_plan='auto'")
        elif size != 1:
            draft.refuse(f"mesh.{axis}", why)
    draft.implied(DATA_AXIS_PATHS, "all ranks that are started")
