"""The `.metadata` of a torch.distributed.checkpoint folder, as plain values that have been checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint.format.tiling import tiling_problem
from terrazzo.checkpoint.importers.parts.archive import Archive
from terrazzo.checkpoint.importers.parts.paths import size_of_plain_file
from terrazzo.checkpoint.importers.parts.unpickle import StandIn, load_pickle
from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.errors import BadInput, Damaged

__all__ = ["METADATA_FILE", "DcpEntry", "TensorEntry", "TreePath", "read_metadata"]

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, and where its blocks are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[Rectangle, Archive]]


DcpEntry = TensorEntry | Archive  # a plain value is one archive
TreePath = tuple[str | int, ...]
"""Where an entry stands in a nested state dict: keys of dicts and indices of lists."""


class _Tensor(StandIn):
    pass


class _Bytes(StandIn):
    pass


def _size(sizes: Any = ()) -> Any:
    """Stands for torch.Size. What it is made of is not copied: a pickle could ask for that without end."""
    return sizes


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    **{
        (_METADATA, name): StandIn
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_OLD, "TensorProperties"): StandIn,
    (_OLD, "MEM_FORMAT_ENCODING"): StandIn,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StandIn,
    ("torch.serialization", "_get_layout"): StandIn,
    ("builtins", "getattr"): StandIn,  # how Python 3.11 pickles members of an Enum
    ("pathlib", "PosixPath"): StandIn,
    ("pathlib", "WindowsPath"): StandIn,
    ("pathlib._local", "PosixPath"): StandIn,
    ("pathlib._local", "WindowsPath"): StandIn,
    ("torch", "Size"): _size,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def read_metadata(folder: Path) -> list[tuple[TreePath, DcpEntry]]:
    """What a folder holds, each with its place in the state dict that was saved, in its order.

    Raises:
        BadInput: it is not what torch writes, a tensor's blocks overlap or leave gaps, or a file is missing or not
            inside the folder.
        Damaged: a file is shorter than what it holds.
    """
    size_of_plain_file(folder, METADATA_FILE)
    return _Reader(folder).read(load_pickle(folder / METADATA_FILE, _ALLOWED))


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def read(self, metadata: Any) -> list[tuple[TreePath, DcpEntry]]:
        """The checked entries of an unpickled `Metadata`."""
        entries, stored = self._fields(metadata, "state_dict_metadata", "storage_data", kind=dict)
        if not all(isinstance(index, StandIn) for index in stored):
            raise self._damaged("storage_data is not by MetadataIndex")
        infos = {
            (str(index.attribute("fqn")), _ints(index.attribute("offset"))): info for index, info in stored.items()
        }
        tensors = {str(key): self._entry(str(key), entry, infos) for key, entry in entries.items()}
        # The entries are in the order in which ranks shared them out; the state dict's own is that of the places.
        planned = _places(metadata.attribute("planner_data"))
        places: dict[str, TreePath] = {key: place for key, place in planned if key in tensors}
        places |= {key: (key,) for key in tensors if key not in places}
        return [(place, tensors[key]) for key, place in places.items()]

    def _entry(self, key: str, entry: Any, infos: Mapping[Any, Any]) -> DcpEntry:
        if isinstance(entry, _Bytes):
            return self._part(key, infos.get((key, None)))
        if not isinstance(entry, _Tensor):
            raise self._damaged(f"'{key}' is neither a tensor nor a value")
        properties, size, chunks = self._fields(entry, "properties", "size", "chunks")
        shape, dtype = _ints(size), _dtype(properties)
        if shape is None or dtype is None or not isinstance(chunks, list):
            raise self._damaged(f"'{key}' has no shape or no dtype")
        parts = [(box, self._part(key, infos.get((key, box.offsets)))) for box in map(self._box, chunks)]
        if problem := tiling_problem(shape, [box for box, _ in parts]):
            raise self._damaged(f"'{key}': {problem}")
        for box, archive in parts:
            if box.numel * dtype.itemsize > archive.count_bytes:
                raise self._damaged(f"'{key}': {archive.count_bytes} bytes for {box.numel} elements of {dtype}")
        return TensorEntry(shape, dtype, parts)

    def _box(self, chunk: Any) -> Rectangle:
        offsets, sizes = (_ints(value) for value in self._fields(chunk, "offsets", "sizes"))
        if offsets is None or sizes is None or len(offsets) != len(sizes):
            raise self._damaged("a block has no offsets or sizes")
        return Rectangle(offsets, sizes)

    def _part(self, key: str, info: Any) -> Archive:
        name, offset, count = self._fields(info, "relative_path", "offset", "length")
        if not isinstance(name, str) or _ints((offset, count)) is None:
            raise self._damaged(f"'{key}' is in no file")
        if name not in self._sizes:
            self._sizes[name] = size_of_plain_file(self._folder, name)
        if offset + count > self._sizes[name]:
            raise Damaged(
                f"'{self._folder / name}' is cut short: it has {self._sizes[name]:,} bytes, and '{key}' is in {count:,}"
                f" bytes at {offset:,}. Copy it again."
            )
        if info.attribute("transform_descriptors"):
            raise BadInput(f"'{self._folder}' was written through stream transforms, unknown here: save it without.")
        return Archive(self._folder / name, offset, count)

    def _fields(self, record: Any, *names: str, kind: type = object) -> list[Any]:
        values = [record.attribute(name) for name in names] if isinstance(record, StandIn) else []
        if not values or not all(isinstance(value, kind) for value in values):
            raise self._damaged(f"there is no {' or '.join(names)}")
        return values

    def _damaged(self, problem: str) -> BadInput:
        return BadInput(f"'{self._folder / METADATA_FILE}' is not what torch.distributed.checkpoint writes: {problem}.")


def _ints(values: Any) -> tuple[int, ...] | None:
    """`values` if they are a tuple of sizes, else None."""
    good = isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    return values if good else None


def _dtype(properties: Any) -> torch.dtype | None:
    """The dtype in `TensorProperties`, which torch pickles as a tuple or by attributes."""
    state = properties.state if isinstance(properties, StandIn) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _places(planner_data: Any) -> Iterator[tuple[str, TreePath]]:
    """Where in the state dict each key was, as far as that has been written."""
    for key, place in planner_data.items() if isinstance(planner_data, dict) else ():
        if isinstance(place, tuple) and place and all(type(step) in (str, int) for step in place):
            yield key, place
