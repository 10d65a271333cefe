"""Which row of the table `fully_shard` runs: its mesh and `reshard_after_forward`, read and written.

One axis splits every state over it; of two, the first replicates and the second splits; a second axis of one rank is
plain replication, as in DDP. A number for `reshard_after_forward` keeps the weights split over so many ranks between
forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.dialects.description import Setting
from terrazzo.dialects.dialect import Context
from terrazzo.dialects.draft import Pen
from terrazzo.dialects.fsdp.words import HYBRID_ROWS, SHARDING, nearest_row, row_settings, shard_ranks
from terrazzo.dialects.reader import Reader, derived

__all__ = ["DP_DIMS", "MODEL_AXES", "mesh_sizes", "read_mesh", "write_sharding"]

DP_DIMS = ("dp_mesh_dims.shard", "dp_mesh_dims.replicate")
MODEL_AXES = ("pp", "cp", "sp", "ep", "tp")
"""Axes that are no data axes, as they stand in a mesh: pipelines before the data axes, all others after them.

The order counts: context parallel ranks join the shards, and a tensor that FSDP cuts after tensor parallelism did is
stored in strides (DTensor's `_StridedShard`) that only the same order of axes reads back as one.
"""
AXES = ("mesh.dp_replicate", "mesh.dp_shard")
_ROWS = ("zero3", "shard_grad_op", *HYBRID_ROWS, "hpz", "zero0")
_KEPT = {False: ("zero3", "hybrid_shard"), True: ("shard_grad_op", "hybrid_shard_zero2")}
"""Row on one axis and on two, by whether weights are kept after forward."""


@dataclass
class _Mesh:
    """Data axes and others of a mesh as the document names it; None: a size that is left open."""

    replicas: int | None = 1
    shards: int | None = None
    others: dict[str, int | None] = field(default_factory=dict)
    given: bool = False

    @property
    def keys(self) -> Setting[Any]:
        return Setting(None, "file", "mesh") if self.given else Setting(None, "default")


def mesh_sizes(reader: Reader, key: str) -> tuple[int | None, ...] | None:
    """Sizes of a mesh given as a number, a list, or names with sizes; None where there is none or it is no mesh."""
    raw = reader.any(key).value
    if raw is None:
        return None
    sizes = list(raw.values()) if isinstance(raw, Mapping) else raw if isinstance(raw, list | tuple) else [raw]
    if not sizes or not all(size is None or _is_size(size) for size in sizes):
        reader.refuse(key, f"it is {raw!r}, expected the sizes of the axes, such as [2, 4]: replicas, then shards")
        return None
    return tuple(sizes)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- reading -------------------------------------------------------------------------------------------------------


def read_mesh(reader: Reader, context: Context) -> dict[str, Setting[Any]]:
    """The row, and the sizes of all axes."""
    mesh = _mesh(reader)
    found: dict[str, Setting[Any]] = {
        f"mesh.{axis}": derived(n, mesh.keys, origin="file") for axis, n in mesh.others.items()
    }
    return {**found, **_row(reader, mesh)}


def _mesh(reader: Reader) -> _Mesh:
    sizes = mesh_sizes(reader, "mesh")
    shard, replicate = (_names(reader, key) for key in DP_DIMS)
    if sizes is None:
        return _Mesh()
    raw = reader.get("mesh")
    if not isinstance(raw, list | tuple):
        reader.keep("mesh", "axes are named otherwise there", harmless=True)
    if not isinstance(raw, Mapping):
        return _by_order(reader, dict(zip(map(str, range(len(sizes))), sizes, strict=True)), {})
    named = {str(axis): size for axis, size in raw.items()}
    if shard:
        return _by_name(reader, named, shard, replicate)
    others = {axis: named.pop(axis) for axis in MODEL_AXES if axis in named}
    return _by_order(reader, named, others)


def _names(reader: Reader, key: str) -> tuple[str, ...]:
    names: tuple[str, ...] = reader.names(key, null=True).value
    if key in reader.flat:
        reader.keep(key, "data axes have names of their own there", harmless=True)
    return names


def _by_order(reader: Reader, sizes: dict[str, int | None], others: dict[str, int | None]) -> _Mesh:
    values = list(sizes.values())
    if not 1 <= len(values) <= 2:
        reader.refuse("mesh", f"it has {len(values)} data axes; fully_shard takes shards, or replicas and shards")
        return _Mesh(others=others)
    return _Mesh(values[0] if len(values) == 2 else 1, values[-1], others, given=True)


def _by_name(reader: Reader, sizes: dict[str, int | None], shard: tuple[str, ...], replicate: tuple[str, ...]) -> _Mesh:
    absent = [name for name in (*shard, *replicate) if name not in sizes]
    strange = [name for name in sizes if name not in (*shard, *replicate, *MODEL_AXES)]
    if absent or strange:
        fault = (
            f"dp_mesh_dims names '{absent[0]}', which it lacks" if absent else f"its axis '{strange[0]}' is not known"
        )
        reader.refuse("mesh", f"{fault}: its axes are {', '.join(sizes)}")
        return _Mesh()
    others = {axis: sizes[axis] for axis in MODEL_AXES if axis in sizes}
    shards = _product(sizes[name] for name in shard if name not in MODEL_AXES)
    return _Mesh(_product(sizes[name] for name in replicate), shards, others, given=True)


def _product(sizes: Any) -> int | None:
    whole = 1
    for size in sizes:
        if size is None:
            return None
        whole *= size
    return whole


def _row(reader: Reader, mesh: _Mesh) -> dict[str, Setting[Any]]:
    key = "reshard_after_forward"
    raw = reader.get(key)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return _partial(reader, mesh, raw)
    reshard = reader.boolean(key, True, null=True)
    if raw is None:
        reader.say(key, "defaulted", "none: freed after forward, except for the root, which backward needs first")
    if mesh.given and mesh.shards == 1 and raw is not None:
        reader.keep(key, "over a single rank nothing is split", harmless=True)
    return _plain(mesh, reshard)


def _plain(mesh: _Mesh, reshard: Setting[Any]) -> dict[str, Setting[Any]]:
    row = _KEPT[not reshard.value][mesh.replicas != 1]
    if mesh.shards == 1 and mesh.given:
        row = "zero0"
    where = mesh.keys
    sources = (reshard, where) if mesh.replicas != 1 or row == "zero0" else (reshard,)
    replicas, shards = (1, mesh.replicas) if row == "zero0" else (mesh.replicas, mesh.shards)
    return {
        **row_settings(row, *sources),
        "mesh.dp_replicate": derived(replicas, where, origin=where.origin),
        "mesh.dp_shard": derived(shards, where, origin=where.origin),
    }


def _partial(reader: Reader, mesh: _Mesh, size: int) -> dict[str, Setting[Any]]:
    """A number for `reshard_after_forward`."""
    key = "reshard_after_forward"
    number = reader.integer(key, None, low=1)
    whole = mesh.shards
    if number.value is None or (whole is not None and whole % size):
        reader.refuse(key, f"it is {size}, expected true, false, or a divisor of the {whole or 'shard'} ranks")
        return _plain(mesh, Setting(True, "default", key))
    if size in (1, whole):
        reader.say(key, "renamed", f"{size} ranks: the same as {str(size != 1).lower()}")
        return _plain(mesh, Setting(size != 1, "file", key))
    if mesh.replicas != 1:
        why = f"a second group of {size} ranks inside the shards of every replica is no row of the table: freed instead"
        reader.say(key, "lossy", why)
        return _plain(mesh, Setting(True, "default", key))
    replicas = None if whole is None else whole // size
    return {
        **row_settings("hpz", number),
        "mesh.dp_shard": number,
        "mesh.dp_replicate": derived(replicas, number, mesh.keys),
    }


# -- writing -------------------------------------------------------------------------------------------------------


def write_sharding(pen: Pen, context: Context) -> None:
    """Write the row and the axes."""
    pen.implied("mesh.world")
    row, why = nearest_row(pen.description, _ROWS)
    if row == "hpz" and pen.value("mesh.dp_shard") is None:
        row, why = "zero3", "how many ranks keep a second copy is not known (mesh.dp_shard): none is kept"
    if row is None:
        if why:
            pen.refuse(SHARDING, f"{why}: choose a row that fully_shard has, such as zero3")
        return
    _write_reshard(pen, row, why)
    _write_mesh(pen, row, context)


def _write_reshard(pen: Pen, row: str, why: str) -> None:
    key = "reshard_after_forward"
    value: Any = {"hpz": pen.value("mesh.dp_shard"), "shard_grad_op": False, "hybrid_shard_zero2": False}.get(row, True)
    if row == "zero0":
        note = "one rank per shard group: weights, gradients and optimizer state whole on every rank, as in DDP"
        pen.implied(SHARDING, note, "mesh")
    elif pen.own and not pen.wanted("sharding.between", "D", key):
        pen.implied(SHARDING)
    else:
        pen.put(SHARDING, key, value, why, "lossy" if why else "applied")


def _write_mesh(pen: Pen, row: str, context: Context) -> None:
    if pen.own and (pen.kept("mesh") or not any("mesh" in pen.setting(path).keys for path in AXES)):
        pen.implied((*AXES, *(f"mesh.{axis}" for axis in MODEL_AXES)))
        return
    others = {axis: pen.value(f"mesh.{axis}", 1) for axis in MODEL_AXES}
    others = {axis: size for axis, size in others.items() if size != 1}
    sizes = _data_axes(pen, row, context)
    if others:
        _write_named(pen, sizes, others)
    elif len(sizes) == 1 and sizes[0] is None:
        pen.implied(AXES, "all ranks are one axis")
    else:
        open_ended = None in sizes
        why = "null stands for a number of ranks that is not known here: fill it in" if open_ended else ""
        named = dict(zip(("dp_replicate", "dp_shard"), sizes, strict=False)) if len(sizes) == 2 else list(sizes)
        pen.put(AXES, "mesh", list(sizes) if pen.own else named, why, "lossy" if open_ended else "applied")
        if open_ended and row != "zero0":
            pen.lossy(SHARDING, f"mesh {list(sizes)}: {why}", "reshard_after_forward, mesh")


def _data_axes(pen: Pen, row: str, context: Context) -> tuple[int | None, ...]:
    """Sizes of the data axes: shards, or replicas and shards."""
    replicas, shards = pen.value("mesh.dp_replicate"), pen.value("mesh.dp_shard")
    if row in HYBRID_ROWS:
        return (replicas, shard_ranks(pen, context.world))
    known = pen.is_set("mesh.dp_replicate")
    whole = _product((replicas if known else 1, shards))
    if row == "zero0":
        ranks = None if pen.own else pen.value("mesh.world") or context.world
        return (whole or ranks, 1)
    return (whole,)


def _write_named(pen: Pen, sizes: tuple[int | None, ...], others: Mapping[str, int]) -> None:
    names = ("dp_shard",) if len(sizes) == 1 else ("dp_replicate", "dp_shard")
    outer = {axis: size for axis, size in others.items() if axis == "pp"}
    inner = {axis: size for axis, size in others.items() if axis != "pp"}
    pen.put(AXES, "mesh", {**outer, **dict(zip(names, sizes, strict=True)), **inner})
    for axis in others:
        pen.implied(f"mesh.{axis}", "an axis of the mesh; modules are split over it by your code", "mesh")
    shard = ["dp_shard", "cp"] if "cp" in others else "dp_shard"
    pen.write("dp_mesh_dims.shard", shard)
    if len(sizes) == 2:
        pen.write("dp_mesh_dims.replicate", "dp_replicate")
