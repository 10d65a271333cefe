"""torch.distributed.checkpoint folders: what FSDP2, sharded FSDP1, torchtitan and Accelerate write.

Beside `.metadata` there are files of `torch.save` archives end to end, one for each block of a tensor. Of each only the
description and the elements that are asked for are read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint.importers.dcp_metadata import METADATA_FILE, DcpEntry, TreePath, read_metadata
from terrazzo.checkpoint.importers.parts.archive import Archive, ArchivedChunk, PlainValues
from terrazzo.checkpoint.importers.parts.numbering import NOT_KNOWN, ModelNames
from terrazzo.checkpoint.importers.parts.optimizer import add_program
from terrazzo.checkpoint.importers.parts.state_dict import StateDictSource
from terrazzo.checkpoint.importers.parts.values import Chunked, Values
from terrazzo.checkpoint.source import PIECE_BYTES, WEIGHT
from terrazzo.checkpoint.tied_names import same_bits
from terrazzo.errors import BadInput

__all__ = ["DcpCheckpoint", "read_dcp", "recognises", "tie"]

_SAMPLE_NUMEL = 1024


class DcpCheckpoint(StateDictSource):
    """A folder that `torch.distributed.checkpoint.save` wrote, of `get_state_dict` or of a program's own layout.

    Tied parameters are entries of their own there. They are found again by the optimizer, which has only one of them,
    and by their values.

    Raises:
        BadInput: it is damaged, or holds no weights.
    """

    format = "torch.distributed.checkpoint"

    def __init__(self, folder: Path, names: ModelNames = NOT_KNOWN) -> None:
        super().__init__(str(folder))
        add_program(self, read_dcp(folder), names)
        self.identity = hashlib.sha256((folder / METADATA_FILE).read_bytes()).hexdigest()
        tie(self)


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder."""
    return (path / METADATA_FILE).is_file()


def read_dcp(folder: Path) -> dict[str, Any]:
    """The state dict in a folder as a tree. Raises `BadInput`."""
    values = PlainValues()
    tree: dict[Any, Any] = {}
    for place, entry in read_metadata(folder):
        *outer, last = place
        inner = tree
        for step in outer:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise BadInput(f"'{folder / METADATA_FILE}' has two entries at {'.'.join(map(str, place))}: it is damaged.")
        inner[last] = _leaf(place, entry, values)
    return {str(key): _with_lists(value) for key, value in tree.items()}


def tie(source: StateDictSource) -> None:
    """Make aliases of weights that no param group has and that equal one that has been trained.

    Samples tell most apart. What is alike in these is compared whole: it may be a copy of a table from before training,
    of which few rows have changed since.
    """
    if source.optimizer is None:
        return
    grouped = {name for group in source.optimizer.groups for name in group["params"]}
    alone = [name for name in source.tensors if name not in grouped]
    shapes = {source.tensors[name].shape for name in alone}
    trained = [name for name, info in source.tensors.items() if len(info.states) > 1 and info.shape in shapes]
    samples = {_sample(source, name): name for name in trained}
    shapes = {source.tensors[name].shape for name in trained}
    for name in alone:
        if source.tensors[name].shape not in shapes or (sample := _sample(source, name)) is None:
            continue
        if sample in samples and _equal(source.values(name, WEIGHT), source.values(samples[sample], WEIGHT)):
            source.drop(name, alias_of=samples[sample])


def _sample(source: StateDictSource, name: str) -> tuple[object, ...] | None:
    """Shape, dtype and some of the bytes of a weight; None for one of equal elements, which says nothing."""
    values = source.values(name, WEIGHT)
    starts = (0, values.numel // 2, max(0, values.numel - _SAMPLE_NUMEL))
    parts = [values.read(start, min(start + _SAMPLE_NUMEL, values.numel)) for start in starts]
    elements = torch.cat(parts).view(torch.uint8).view(-1, values.dtype.itemsize)
    if bool((elements == elements[:1]).all()):
        return None
    return values.shape, values.dtype, elements.numpy().tobytes()


def _equal(one: Values, other: Values) -> bool:
    """Whether two weights of one shape and dtype have the same bits."""
    step = PIECE_BYTES // one.dtype.itemsize
    pieces = ((start, min(start + step, one.numel)) for start in range(0, one.numel, step))
    return all(same_bits(one.read(*piece), other.read(*piece)) for piece in pieces)


def _leaf(place: TreePath, entry: DcpEntry, values: PlainValues) -> Any:
    if isinstance(entry, Archive):
        return values.read(entry)
    what = ".".join(map(str, place))
    chunks = [ArchivedChunk(box, archive, entry.dtype, what) for box, archive in entry.chunks]
    parts = tuple(archive for _, archive in entry.chunks)
    return Chunked(entry.shape, entry.dtype, chunks, identity=(entry.shape, *parts) if parts else None)


def _with_lists(tree: Any) -> Any:
    """A tree in which what has numbers for keys is a list."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    return [items[key] for key in sorted(items)] if items and all(type(key) is int for key in items) else items
