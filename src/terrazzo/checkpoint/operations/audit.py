"""Every digest of a checkpoint recomputed, in threads: which files, tensors and bytes are not as they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from terrazzo.checkpoint.format.manifest import File
from terrazzo.checkpoint.loading.load import open_source, own_folder
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.storage.blocks import DigestBlock
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.errors import BadInput, Damaged
from terrazzo.messages import listed

__all__ = ["open_audit"]

_BLOCKS_AT_ONCE = 16  # a task of a thread: 64 MiB
_Bad = tuple[DigestBlock, BadInput]


def open_audit(path: str) -> Audit:
    """See `Audit`. Raises `BadInput` for other formats too."""
    if (folder := own_folder(path)) is not None:
        return Audit(folder)
    source = open_source(path)
    raise BadInput(f"'{path}' is of the format {source.format}: it holds no digests to verify it against.")


class Audit:
    """A Terrazzo checkpoint of which any byte may be wrong, and files missing or of another size.

    Raises:
        Damaged: the manifest or its seal is missing or changed, so that there is nothing to go by.
        BadInput: it is of another version.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder, self._checkpoint = folder, TerrazzoCheckpoint(folder, sizes=False)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files of the checkpoint, as they were written."""
        return sum(file.size_bytes for file in self._checkpoint.manifest.files)

    def problems(self, threads: int, advance: Callable[[int], None]) -> list[BadInput]:
        """Recompute every digest; all that is wrong, naming file, tensor and bytes.

        What is `Damaged` is; anything else could not be read, which does not say whether it is whole.
        """
        problems: list[BadInput] = []
        present: list[DigestBlock] = []
        by_file = self._checkpoint.blocks()
        for file in self._checkpoint.manifest.files:
            size_bytes, problem = _size_problem(self._folder, file)
            there = [block for block in by_file[file.name] if block.offset + block.count_bytes <= size_bytes]
            if problem is not None:
                problems.append(_naming(problem, by_file[file.name][len(there) :]))
            present += there
        tasks = [present[first : first + _BLOCKS_AT_ONCE] for first in range(0, len(present), _BLOCKS_AT_ONCE)]
        with ThreadPoolExecutor(threads) as pool:  # hashing and reading release the interpreter's lock
            bad = [each for task in pool.map(lambda blocks: self._check(blocks, advance), tasks) for each in task]
        return problems + [error for _, error in _joined(self._folder, bad)]

    def _check(self, blocks: Sequence[DigestBlock], advance: Callable[[int], None]) -> list[_Bad]:
        buffer, bad = memoryview(bytearray(max(block.count_bytes for block in blocks))), []
        for block in blocks:
            try:
                block.check(self._folder, buffer)
            except BadInput as error:
                bad.append((block, error))
            advance(block.count_bytes)
        return bad


def _size_problem(folder: CheckpointFolder, file: File) -> tuple[int, BadInput | None]:
    """How large a file is, and what is wrong with that."""
    try:
        size_bytes = folder.size_bytes(file.name)
    except BadInput as error:
        return 0, error
    if size_bytes == file.size_bytes:
        return size_bytes, None
    was = file.size_bytes
    what = f"bytes {size_bytes} to {was - 1} are missing" if size_bytes < was else f"byte {was} and on are not its own"
    return size_bytes, Damaged(
        f"'{folder.where}/{file.name}' has {size_bytes} bytes and was written with {was}: {what}."
    )


def _naming(problem: BadInput, blocks: Sequence[DigestBlock]) -> BadInput:
    """`problem` of a file, and what lies in the `blocks` that it makes unreadable."""
    names = list(dict.fromkeys(block.what for block in blocks))
    how = "Gone" if isinstance(problem, Damaged) else "Not read"
    return type(problem)(f"{problem} {how} with it: {listed(names, mark=';')}.") if names else problem


def _joined(folder: CheckpointFolder, bad: Iterable[_Bad]) -> list[_Bad]:
    """Changed blocks that follow each other in one state, as one."""
    joined: list[_Bad] = []
    for block, error in bad:
        last, before = joined[-1] if joined else (block, error)
        follows = (last.file, last.what, last.offset + last.count_bytes) == (block.file, block.what, block.offset)
        if follows and str(before) == last.changed(folder) and str(error) == block.changed(folder):
            last = replace(last, count_bytes=last.count_bytes + block.count_bytes)
            joined[-1] = last, Damaged(last.changed(folder))
        else:
            joined.append((block, error))
    return joined
