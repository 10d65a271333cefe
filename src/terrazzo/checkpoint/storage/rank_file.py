"""One rank's file, written in one pass with a digest of every block.

Nothing is gathered and nothing but a block is copied; a block that has been written is read back and compared before
the file counts as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from terrazzo.checkpoint.format.manifest import BLOCK_BYTES, File, blocks_of
from terrazzo.checkpoint.format.rank_layout import FileEntry, digest, header_of
from terrazzo.checkpoint.storage.store import CheckpointDraft, CheckpointFolder, FileWriter
from terrazzo.errors import Damaged

__all__ = [
    "WrittenFile",
    "checked_block",
    "write_rank_file",
]


@dataclass(frozen=True)
class WrittenFile:
    """What a rank reports of its file: plain values, ready for the manifest."""

    file: File
    digests: list[list[str]]


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
