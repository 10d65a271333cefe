"""Every digest of a checkpoint recomputed, in threads: which files, tensors and bytes are not as they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from terrazzo.checkpoint.manifest import File
from terrazzo.checkpoint.native import Checkpoint, DigestBlock
from terrazzo.checkpoint.read import open_source, own_folder
from terrazzo.checkpoint.store import Folder
from terrazzo.errors import BadInput, Damaged

__all__ = ["open_audit"]

_BLOCKS_AT_ONCE = 16  # a task of a thread: 64 MiB


def open_audit(path: str) -> Audit:
    """See `Audit`. Raises `BadInput` for other formats too."""
    if (folder := own_folder(path)) is not None:
        return Audit(folder)
    found = open_source(path)
    raise BadInput(f"'{path}' is of the format {found.format}: it holds no digests to verify it against.")


class Audit:
    """A Terrazzo checkpoint of which any byte may be wrong, and files missing or of another size.

    Raises:
        Damaged: the manifest or its seal is missing or changed, so that there is nothing to go by.
        BadInput: it is of another version.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder, self._checkpoint = folder, Checkpoint(folder, sizes=False)

    @property
    def size_bytes(self) -> int:
        """Of all its files, as they were written."""
        return sum(file.size_bytes for file in self._checkpoint.manifest.files)

    def problems(self, threads: int, advance: Callable[[int], None]) -> list[str]:
        """Recompute every digest; all that is wrong, naming file, tensor and bytes."""
        problems, present = [], []
        by_file = self._checkpoint.blocks()
        for file in self._checkpoint.manifest.files:
            size_bytes, problem = _size_problem(self._folder, file)
            there = [block for block in by_file[file.name] if block.offset + block.count_bytes <= size_bytes]
            if problem is not None:
                problems.append(f"{problem}{_gone(by_file[file.name][len(there) :])}")
            present += there
        tasks = [present[first : first + _BLOCKS_AT_ONCE] for first in range(0, len(present), _BLOCKS_AT_ONCE)]
        with ThreadPoolExecutor(threads) as pool:  # hashing and reading release the interpreter's lock
            bad = [found for task in pool.map(lambda blocks: self._check(blocks, advance), tasks) for found in task]
        return problems + [text for _, text in _joined(self._folder, bad)]

    def _check(self, blocks: Sequence[DigestBlock], advance: Callable[[int], None]) -> list[tuple[DigestBlock, str]]:
        buffer, bad = memoryview(bytearray(max(block.count_bytes for block in blocks))), []
        for block in blocks:
            if (problem := block.problem(self._folder, buffer)) is not None:
                bad.append((block, problem))
            advance(block.count_bytes)
        return bad


def _size_problem(folder: Folder, file: File) -> tuple[int, str | None]:
    """How large a file is, and what is wrong with that."""
    try:
        size_bytes = folder.size_bytes(file.name)
    except Damaged as error:
        return 0, str(error)
    if size_bytes == file.size_bytes:
        return size_bytes, None
    was = file.size_bytes
    what = f"bytes {size_bytes} to {was - 1} are missing" if size_bytes < was else f"byte {was} and on are not its own"
    return size_bytes, f"'{folder.where}/{file.name}' has {size_bytes} bytes and was written with {was}: {what}."


def _gone(blocks: Sequence[DigestBlock]) -> str:
    """What went with the end of a file."""
    names = list(dict.fromkeys(block.what for block in blocks))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" Gone with it: {'; '.join(names[:3])}{more}." if names else ""


def _joined(folder: Folder, bad: Iterable[tuple[DigestBlock, str]]) -> list[tuple[DigestBlock, str]]:
    """Changed blocks that follow each other in one state, as one."""
    joined: list[tuple[DigestBlock, str]] = []
    for block, text in bad:
        last, said = joined[-1] if joined else (block, "")
        follows = (last.file, last.what, last.offset + last.count_bytes) == (block.file, block.what, block.offset)
        if follows and said == last.changed(folder) and text == block.changed(folder):
            last = replace(last, count_bytes=last.count_bytes + block.count_bytes)
            joined[-1] = last, last.changed(folder)
        else:
            joined.append((block, text))
    return joined
