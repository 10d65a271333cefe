"""Which row of the table `fully_shard` runs: its mesh and `reshard_after_forward`.

One axis splits every state over it; of two, the first replicates and the second splits; a second axis of one rank is
plain replication, as in DDP. A number for `reshard_after_forward` keeps the weights split over so many ranks between
forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.keys import integer
from terrazzo.dialects.core.reader import Reader, derived
from terrazzo.dialects.formats.fsdp2.keys import MESH_ORDER
from terrazzo.dialects.formats.shared.fsdp_arguments import mesh_sizes
from terrazzo.dialects.formats.shared.plan_rows import row_settings

__all__ = ["product", "read_mesh"]


_DP_DIMS = ("dp_mesh_dims.shard", "dp_mesh_dims.replicate")
_ROWS_BY_KEEPING = {False: ("zero3", "hybrid_shard"), True: ("shard_grad_op", "hybrid_shard_zero2")}
"""Row on one axis and on two, by whether weights are kept after forward."""


@dataclass
class _Mesh:
    """Data axes and others of a mesh as the document names it; None: a size that is left open.

    Attributes:
        joined: ranks along `cp` that the shards are split over as well.
    """

    replicas: int | None = 1
    shards: int | None = None
    joined: int | None = 1
    others: dict[str, int | None] = field(default_factory=dict)
    in_document: bool = False

    @property
    def parts(self) -> int | None:
        """How many parts each state is split into, if that is known."""
        return product((self.shards, self.joined))

    @property
    def keys(self) -> Setting[Any]:
        return Setting(None, "file", "mesh") if self.in_document else Setting(None, "default")


def read_mesh(reader: Reader, context: ReadingContext) -> SettingsByPath:
    """The row, and the sizes of all axes."""
    mesh = _mesh(reader)
    settings: SettingsByPath = {f"mesh.{axis}": derived(n, mesh.keys, origin="file") for axis, n in mesh.others.items()}
    return {**settings, **_row(reader, mesh)}


def _mesh(reader: Reader) -> _Mesh:
    sizes = mesh_sizes(reader, "mesh")
    shard, replicate = (_names(reader, key) for key in _DP_DIMS)
    raw = reader.raw("mesh")
    for key in _DP_DIMS if not isinstance(raw, Mapping) else ():
        reader.refuse(key, "it names axes of mesh, which has no names: say {name: size, ...}")
    if sizes is None:
        return _Mesh()
    if not isinstance(raw, list | tuple):
        reader.keep("mesh", "axes are named otherwise there", loss="harmless")
    if not isinstance(raw, Mapping):
        return _by_order(reader, dict(zip(map(str, range(len(sizes))), sizes, strict=True)), {})
    named = {str(axis): size for axis, size in raw.items()}
    if shard or replicate:  # without shards, plain replicas
        return _by_name(reader, named, shard, replicate)
    others = {axis: named.pop(axis) for axis in MESH_ORDER if axis in named}
    return _by_order(reader, named, others)


def _names(reader: Reader, key: str) -> tuple[str, ...]:
    names: tuple[str, ...] = reader.take(key).value
    if key in reader.flat:
        reader.keep(key, "data axes have names of their own there", loss="harmless")
    return names


def _by_order(reader: Reader, sizes: dict[str, int | None], others: dict[str, int | None]) -> _Mesh:
    values = list(sizes.values())
    if not 1 <= len(values) <= 2:
        reader.refuse("mesh", f"it has {len(values)} data axes; fully_shard takes shards, or replicas and shards")
        return _Mesh(others=others)
    shards = product((values[-1], others.get("ep", 1)))
    return _Mesh(values[0] if len(values) == 2 else 1, shards, others=others, in_document=True)


def _by_name(reader: Reader, sizes: dict[str, int | None], shard: tuple[str, ...], replicate: tuple[str, ...]) -> _Mesh:
    absent = [f"dp_mesh_dims names '{name}', which it lacks" for name in (*shard, *replicate) if name not in sizes]
    strange = [f"its axis '{name}' is not known" for name in sizes if name not in (*shard, *replicate, *MESH_ORDER)]
    data = ((shard, ("ep", "cp")), (replicate, ("ep",)))
    wrong = [name for names, fine in data for name in names if name in MESH_ORDER and name not in fine]
    taken = [f"dp_mesh_dims takes '{name}' for a data axis, and by its name it is none" for name in wrong]
    apart = sizes.get("ep", 1) != 1 and "ep" not in (*shard, *replicate)
    left = ["dp_mesh_dims leaves out its axis 'ep', whose ranks are data ranks of all but the experts"] if apart else []
    for fault in (*absent, *strange, *taken, *left):
        reader.refuse("mesh", f"{fault}: its axes are {', '.join(sizes)}")
        return _Mesh()
    others = {axis: sizes[axis] for axis in MESH_ORDER if axis in sizes}
    if others.get("cp", 1) != 1 and "cp" not in shard:
        why = "of ranks along cp each has the same shards there, and elsewhere these are split over them, too"
        reader.mark("dp_mesh_dims.shard", "lossy", why)
    shards, joined = (product(sizes[name] for name in shard if (name == "cp") is cp) for cp in (False, True))
    return _Mesh(product(sizes[name] for name in replicate), shards, joined, others, in_document=True)


def product(sizes: Any) -> int | None:
    """The product of sizes; None where one is left open."""
    whole = 1
    for size in sizes:
        if size is None:
            return None
        whole *= size
    return whole


def _row(reader: Reader, mesh: _Mesh) -> SettingsByPath:
    key = "reshard_after_forward"
    raw = reader.raw(key)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return _partial(reader, mesh, raw)
    reshard = reader.take(key)
    if raw is None:
        reader.mark(key, "defaulted", "none: freed after forward, except for the root, which backward needs first")
    if mesh.in_document and mesh.parts == 1 and raw is not None:
        reader.keep(key, "over a single rank nothing is split", loss="harmless")
    return _plain(mesh, reshard)


def _plain(mesh: _Mesh, reshard: Setting[Any]) -> SettingsByPath:
    row = _ROWS_BY_KEEPING[not reshard.value][mesh.replicas != 1]
    if mesh.parts == 1 and mesh.in_document:
        row = "zero0"
    where = mesh.keys
    sources = (reshard, where) if mesh.replicas != 1 or row == "zero0" else (reshard,)
    replicas, shards = (1, mesh.replicas) if row == "zero0" else (mesh.replicas, mesh.shards)
    return {
        **row_settings(row, *sources),
        "mesh.dp_replicate": derived(replicas, where, origin=where.origin),
        "mesh.dp_shard": derived(shards, where, origin=where.origin),
    }


def _partial(reader: Reader, mesh: _Mesh, size: int) -> SettingsByPath:
    """A number for `reshard_after_forward`."""
    key = "reshard_after_forward"
    number = reader.take_as(key, integer(1))
    whole = mesh.parts
    if number.value is None or (whole is not None and whole % size):
        reader.refuse(key, f"it is {size}, expected true, false, or a divisor of the {whole or 'shard'} ranks")
        return _plain(mesh, Setting(True, "default", key))
    if size in (1, whole):
        reader.mark(key, "renamed", f"{size} ranks: the same as {str(size != 1).lower()}")
        return _plain(mesh, Setting(size != 1, "file", key))
    if mesh.replicas != 1 or mesh.joined != 1:
        of = "every replica" if mesh.joined == 1 else "data and context parallel ranks"
        why = f"a second group of {size} ranks inside the shards of {of} is no row of the table: freed instead"
        reader.mark(key, "lossy", why)
        return _plain(mesh, Setting(True, "default", key))
    replicas = None if whole is None else whole // size
    return {
        **row_settings("hpz", number),
        "mesh.dp_shard": number,
        "mesh.dp_replicate": derived(replicas, number, mesh.keys),
    }
