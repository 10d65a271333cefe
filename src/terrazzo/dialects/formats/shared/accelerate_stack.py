"""What Accelerate and the Trainer on it share: the axes of a `ParallelismConfig`, read, checked and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, Setting, SettingsByPath
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.core.reader import Reader

__all__ = [
    "AXES",
    "axis_faults",
    "read_axes",
    "write_replica_axes",
]

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""Axes of the mesh that a `ParallelismConfig` has a size for."""


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
