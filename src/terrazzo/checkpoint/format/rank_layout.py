"""How the bytes of one rank's file lie: a safetensors header, padded so that tensors start on a page, then these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from terrazzo.checkpoint.format.manifest import DTYPES, ITEMSIZES

__all__ = ["FileEntry", "TilePlace", "arrange", "digest", "header_of", "rank_file_name", "safetensors_header"]

_PAGE_BYTES = 4096


class TilePlace(NamedTuple):
    """Where a tile is in the index space of its state; `engine`'s `Rectangle` for a process that imports no torch."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class FileEntry(NamedTuple):
    """Elements `start..stop` of a tile of one state of a tensor, and the byte of the data section where they begin.

    Attributes:
        shape: of the whole tensor, and `numel` of the whole state.
        tile: None where the state is not cut.
    """

    name: str
    kind: str
    start: int
    stop: int
    shape: tuple[int, ...]
    numel: int
    dtype: str
    tile: TilePlace | None = None
    offset: int = 0

    @property
    def key(self) -> str:
        """The name under which the file holds it."""
        at = "" if self.tile is None else f"{','.join(map(str, self.tile.offsets))}|"
        return f"{self.name}|{self.kind}|{at}{self.start}"

    @property
    def count_bytes(self) -> int:
        """The bytes of the entry."""
        return (self.stop - self.start) * ITEMSIZES[self.dtype]


def rank_file_name(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(data: memoryview | bytes) -> str:
    """BLAKE3 of `data`, its first 16 bytes in hexadecimal."""
    return blake3(data).hexdigest(length=16)


def arrange(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """`entries` with their offsets, one after the other; wide elements first, so that each is aligned."""
    offset, placed = 0, []
    for entry in sorted(entries, key=lambda entry: -ITEMSIZES[entry.dtype]):
        placed.append(entry._replace(offset=offset))
        offset += entry.count_bytes
    return placed


def header_of(entries: Sequence[FileEntry]) -> bytes:
    """The safetensors header of arranged `entries`, its own length in front and blanks at its end."""
    tensors = ((entry.key, entry.dtype, [entry.stop - entry.start]) for entry in entries)
    return safetensors_header("terrazzo", tensors, _PAGE_BYTES)


def safetensors_header(written_by: str, tensors: Iterable[tuple[str, str, Sequence[int]]], align: int) -> bytes:
    """The beginning of a file of these tensors, by name, dtype and shape, which begin at a multiple of `align` bytes.

    The JSON's length in eight bytes, and the JSON with blanks at its end.
    """
    header: dict[str, Any] = {"__metadata__": {"format": written_by}}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * ITEMSIZES[dtype]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // align) * align - 8
    return length.to_bytes(8, "little") + text.ljust(length)
