"""Writing the row and the mesh that `fully_shard` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import DATA_AXIS_PATHS, SHARDING_PATHS
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.formats.fsdp2.keys import MESH_ORDER
from terrazzo.dialects.formats.fsdp2.read_mesh import product
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.plan_rows import HYBRID_ROWS, choose_row, shard_ranks

__all__ = ["write_sharding"]

_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS, "hpz", "zero0")


def write_sharding(draft: Draft, context: ReadingContext) -> None:
    """Write the row and the axes."""
    leave_to_launcher(draft)
    row, why = choose_row(draft, _ROWS, "a row that fully_shard has, such as zero3")
    if row == "hpz" and draft.value("mesh.dp_shard") is None:
        row, why = "zero3", "how many ranks keep a second copy is not known (mesh.dp_shard): none is kept"
    if row is not None:
        _write_reshard(draft, row, why)
    _write_mesh(draft, row, context)


def _write_reshard(draft: Draft, row: str, why: str) -> None:
    key = "reshard_after_forward"
    value: Any = {"hpz": draft.value("mesh.dp_shard"), "shard_grad_op": False, "hybrid_shard_zero2": False}.get(
        row, True
    )
    if row == "zero0":
        note = "one rank per shard group: weights, gradients and optimizer state whole on every rank, as in DDP"
        draft.implied(SHARDING_PATHS, note, "mesh")
    else:
        draft.put(SHARDING_PATHS, key, value, why, "lossy" if why else "applied")


def _write_mesh(draft: Draft, row: str | None, context: ReadingContext) -> None:
    """Write the axes: none where all ranks are one, sizes where one is no other's, and else names with sizes."""
    others = {axis: draft.value(f"mesh.{axis}", 1) for axis in MESH_ORDER}
    others = {axis: size for axis, size in others.items() if size != 1}
    sizes = _data_axes(draft, row, context, alone=not others)
    if not others and sizes == (None,):
        draft.implied(DATA_AXIS_PATHS, "all ranks are one axis")
        return
    named = dict(zip(("dp_shard",) if len(sizes) == 1 else ("dp_replicate", "dp_shard"), sizes, strict=True))
    why = "null stands for a number of ranks that is not known here: fill it in" if None in sizes else ""
    kind: VerdictKind = "lossy" if why else "applied"
    if others:
        outer, inner = ({axis: n for axis, n in others.items() if (axis == "pp") is first} for first in (True, False))
        draft.put(DATA_AXIS_PATHS, "mesh", {**outer, **named, **inner}, why, kind)
        _data_names(draft, named, others)
    else:
        draft.put(DATA_AXIS_PATHS, "mesh", named if len(sizes) == 2 else list(sizes), why, kind)
    if why and row != "zero0":
        draft.lossy(SHARDING_PATHS, f"mesh {list(sizes)}: {why}", "reshard_after_forward, mesh")


def _data_names(draft: Draft, named: Mapping[str, int | None], others: Mapping[str, int]) -> None:
    """Say which axes of a larger mesh are data axes; context parallel ranks join the shards."""
    for axis in others:
        draft.implied(f"mesh.{axis}", "an axis of the mesh; modules are split over it by your code", "mesh")
    draft.write("dp_mesh_dims.shard", ["dp_shard", "cp"] if "cp" in others else "dp_shard")
    if "dp_replicate" in named:
        draft.write("dp_mesh_dims.replicate", "dp_replicate")


def _data_axes(draft: Draft, row: str | None, context: ReadingContext, *, alone: bool) -> tuple[int | None, ...]:
    """Sizes of the data axes: shards, or replicas and shards. `alone`: there are no others, and one may be open."""
    replicas, shards = draft.value("mesh.dp_replicate"), draft.value("mesh.dp_shard")
    if row in HYBRID_ROWS:
        return (replicas, shard_ranks(draft, context.world))
    known = draft.is_set("mesh.dp_replicate")
    whole = product((replicas if known else 1, shards))
    if row == "zero0" or not alone:
        whole = whole or ranks_left(draft.description, context.world, SAME_DATA_AXES)
    return (whole, 1) if row == "zero0" else (whole,)
