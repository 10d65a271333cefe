"""What Accelerate and the Trainer on it share: axes, and the precision that they train in, by what stands under it.

What a word such as `bf16: true` means depends on the stack: Accelerate lifts trainable FSDP parameters to fp32 before
they are sharded, and gathers and reduces in 16 bits; under DDP, weights keep the dtype in which the model was loaded.
In both it runs the forward under autocast and returns fp32. transformers' own sharding keeps the loaded dtype, and
reduces in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, LOADED, PARAMETER_DTYPES, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.shared.fsdp_policy import dtype_of_sums, load_dtype
from terrazzo.engine import LossScaling
from terrazzo.words import DTYPE_SPELLINGS

__all__ = [
    "AT_ONCE",
    "AUTOCAST",
    "AXES",
    "axis_faults",
    "read_axes",
    "stack_precision",
    "stays_as_loaded",
    "write_replica_axes",
]

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""Axes of the mesh that a `ParallelismConfig` has a size for."""

AUTOCAST = "Accelerate runs the forward under autocast: norms, softmax and losses compute in fp32"

AT_ONCE = (
    "GradientAccumulationPlugin(sync_each_batch=True) has each micro-batch's gradients reduced, and summed in fp32"
)
"""How gradients of several micro-batches are summed in fp32 under FSDP, which else sums what it has not reduced."""


def read_axes(reader: Reader, key: str, *, fsdp: bool) -> SettingsByPath:
    """Degrees of a `ParallelismConfig`. Without one all ranks are one axis; within it, a size that is not given is 1.

    Args:
        key: of an axis's size, with `{}` in the place of its name.
        fsdp: whether FSDP shards: what else there is takes the ranks that are left, whatever dp_shard_size says.
    """
    settings = {f"mesh.{axis}": reader.take(key.format(axis)) for axis in AXES}
    shards = settings["mesh.dp_shard"]
    if not fsdp and shards.origin == "file":
        reader.keep(shards.key, "nothing is split over it", loss="harmless")
    if not fsdp or not any(size.origin == "file" for size in settings.values()):
        settings["mesh.dp_shard"] = Setting(None, "default")
    return settings


def axis_faults(sizes: Mapping[str, int], stack: str) -> Iterator[tuple[str, str]]:
    """The axes of a `ParallelismConfig` that Accelerate stops at or passes over, each with why.

    Args:
        sizes: by axis; one that is not given is 1.
        stack: `fsdp1`, `fsdp2`, `deepspeed` or another.
    """
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        yield "cp", "cp and sp both split the sequence: Accelerate takes one of them"
    if (sizes["tp"] > 1 or sizes["cp"] > 1) and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        yield "dp_shard", "tp or cp beside plain replicas: Accelerate wants dp_shard_size above 1"
    elif stack == "fsdp2" and sizes["dp_shard"] == 1 and sizes["cp"] == 1:
        yield "dp_shard", "it is 1, also where it is not given: there is nothing to shard over, and Accelerate stops"
    if sizes["sp"] > 1 and stack != "deepspeed":
        yield "sp", "Accelerate splits sequences by Ulysses under DeepSpeed alone"


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
            row |= {**lifted, "reduce": half.value, "accumulate": dtype_of_sums("fp32", half.value, deferred=deferred)}
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
