"""One rank's file: its ranges as a safetensors file, written in one pass with a digest of every block.

The header comes first and is padded, so that the tensors' bytes start on a page. Nothing is gathered and nothing but a
block is copied; a block that has been written is read back and compared before the file counts as written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from blake3 import blake3

from terrazzo.checkpoint.format.manifest import BLOCK_BYTES, DTYPES, ITEMSIZES, File, blocks_of
from terrazzo.checkpoint.storage.store import CheckpointDraft, CheckpointFolder, FileWriter
from terrazzo.errors import Damaged

__all__ = [
    "FileEntry",
    "WrittenFile",
    "arrange",
    "checked_block",
    "digest",
    "rank_file_name",
    "safetensors_header",
    "write_rank_file",
]

_PAGE_BYTES = 4096


class FileEntry(NamedTuple):
    """Elements `start..stop` of a tile of one state of a tensor, and the byte of the data section where they begin.

    Attributes:
        shape: of the whole tensor, and `numel` of the whole state.
        tile: offsets and sizes; None where the state is not cut.
    """

    name: str
    kind: str
    start: int
    stop: int
    shape: tuple[int, ...]
    numel: int
    dtype: str
    tile: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    offset: int = 0

    @property
    def key(self) -> str:
        """The name under which the file holds it."""
        at = "" if self.tile is None else f"{','.join(map(str, self.tile[0]))}|"
        return f"{self.name}|{self.kind}|{at}{self.start}"

    @property
    def count_bytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class WrittenFile:
    """What a rank reports of its file: plain values, ready for the manifest."""

    file: File
    digests: list[list[str]]


def rank_file_name(rank: int) -> str:
    """Of the file that `rank` writes."""
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


def write_rank_file(
    draft: CheckpointDraft,
    name: str,
    entries: Sequence[FileEntry],
    entry_bytes: Callable[[FileEntry], memoryview],
    on_block: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Write arranged `entries`, whose bytes `entry_bytes` gives, and make sure that they are there.

    `on_block` is called after each block.
    Raises `OSError` as the file system does, and `Damaged` when what is read back is not what was written.
    """
    header = header_of(entries)
    size_bytes = len(header) + (entries[-1].offset + entries[-1].count_bytes if entries else 0)
    sink = draft.create(name, size_bytes)
    try:
        sink.write(memoryview(header))
        digests = [_write_entry(sink, entry_bytes(entry), on_block) for entry in entries]
    except BaseException:
        sink.abandon()
        raise
    written = WrittenFile(
        File(name=name, size_bytes=size_bytes, header_bytes=len(header), header_digest=digest(header)), digests
    )
    with ThreadPoolExecutor(1) as pool:  # reading back does not wait for the disk: let it pass the time
        flushed = pool.submit(sink.finish)
        if (folder := draft.folder()) is not None:
            _read_back(folder, written, entries, on_block)
        flushed.result()
    return written


def checked_block(folder: CheckpointFolder, file: str, offset: int, buffer: memoryview, expected: str) -> bool:
    """Read a block into `buffer`; whether it has the digest that it had when it was written."""
    folder.read_into(file, offset, buffer)
    return digest(buffer) == expected


def _write_entry(sink: FileWriter, data: memoryview, on_block: Callable[[], None]) -> list[str]:
    return [_write_block(sink, data[first:last], on_block) for first, last in blocks_of(len(data))]


def _write_block(sink: FileWriter, block: memoryview, on_block: Callable[[], None]) -> str:
    value = digest(block)
    sink.write(block)
    on_block()
    return value


def _read_back(
    folder: CheckpointFolder, written: WrittenFile, entries: Sequence[FileEntry], on_block: Callable[[], None]
) -> None:
    buffer = memoryview(bytearray(max(BLOCK_BYTES, written.file.header_bytes)))
    for offset, count_bytes, expected, what in _blocks(written, entries):
        if not checked_block(folder, written.file.name, offset, buffer[:count_bytes], expected):
            raise Damaged(
                f"'{folder.where}/{written.file.name}': {what} was written at byte {offset} and reads otherwise."
            )
        on_block()


def _blocks(written: WrittenFile, entries: Sequence[FileEntry]) -> Iterator[tuple[int, int, str, str]]:
    header = written.file
    yield 0, header.header_bytes, header.header_digest, "the header"
    for entry, digests in zip(entries, written.digests, strict=True):
        for (first, last), expected in zip(blocks_of(entry.count_bytes), digests, strict=True):
            yield written.file.header_bytes + entry.offset + first, last - first, expected, entry.key
