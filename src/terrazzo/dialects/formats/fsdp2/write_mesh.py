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
    others = {axis: draft.value(f"mesh.{axis}", 1) for axis in MESH_ORDER}
    others = {axis: size for axis, size in others.items() if size != 1}
    if row == "hpz" and others:
        row, why = "zero3", "fully_shard keeps no second copy in a mesh of other axes, too (dp_mesh_dims): none is kept"
    if row is not None:
        _write_reshard(draft, row, why)
    _write_mesh(draft, row, others, context)


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


def _write_mesh(draft: Draft, row: str | None, others: dict[str, int], context: ReadingContext) -> None:
    """Write the axes: none where all ranks are one, sizes where there are no `others`, and else names with sizes."""
    sizes = _data_axes(draft, row, context, alone=not others)
    if not others and sizes == (None,):
        draft.implied(DATA_AXIS_PATHS, "all ranks are one axis")
        return
    named = dict(zip(("dp_shard",) if len(sizes) == 1 else ("dp_replicate", "dp_shard"), sizes, strict=True))
    why = "null stands for a number of ranks that is not known here: fill it in" if None in sizes else ""
    kind: VerdictKind = "lossy" if why else "applied"
    cut = "dp_replicate" if row == "zero0" else "dp_shard"
    if "ep" in others and not _cut_by_experts(draft, named, cut):
        del others["ep"]
    if others:
        outer, inner = ({axis: n for axis, n in others.items() if (axis == "pp") is first} for first in (True, False))
        draft.put(DATA_AXIS_PATHS, "mesh", {**outer, **named, **inner}, why, kind)
        _name_axes(draft, named, others, cut)
    else:
        draft.put(DATA_AXIS_PATHS, "mesh", named if len(sizes) == 2 else list(sizes), why, kind)
    if why and row != "zero0":
        draft.lossy(SHARDING_PATHS, f"mesh {list(sizes)}: {why}", "reshard_after_forward, mesh")


def _cut_by_experts(draft: Draft, named: dict[str, int | None], cut: str) -> bool:
    """Leave the ranks of a data axis that have the same experts; whether as many as `ep` divide it."""
    size, ep = named[cut], draft.value("mesh.ep")
    if size is not None and size % ep:
        why = f"experts are shared by ranks of {cut} there: choose an ep that divides its {size}"
        draft.refuse("mesh.ep", why)
        return False
    named[cut] = None if size is None else size // ep
    return True


def _name_axes(draft: Draft, named: Mapping[str, int | None], others: Mapping[str, int], cut: str) -> None:
    """Say which axes of a larger mesh are data axes: `ep` is part of one, and context parallel ranks join the shards.

    Args:
        cut: the data axis that `ep` is cut from.
    """
    for axis in others:
        draft.implied(f"mesh.{axis}", "an axis of the mesh; modules are split over it by your code", "mesh")
    if "ep" in others:
        why = f"a part of {cut}; your code splits experts over it, and calls on them leave it out of dp_mesh_dims"
        draft.implied("mesh.ep", why, "mesh")
    dims = {axis: [axis, *(["ep"] if axis == cut and "ep" in others else [])] for axis in named}
    dims["dp_shard"] += ["cp"] if "cp" in others else []
    for axis, key in (("dp_shard", "shard"), ("dp_replicate", "replicate")):
        if axis in dims:
            draft.write(f"dp_mesh_dims.{key}", dims[axis] if len(dims[axis]) > 1 else axis)


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
