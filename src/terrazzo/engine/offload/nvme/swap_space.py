"""Swap files of one rank as one space of bytes, read and written in blocks by a few threads.

Nothing here outlives the process or is ever flushed: a checkpoint holds what must survive. Blocks go round-robin over
one file per folder, so that several disks work at once.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.offload.nvme.swap_file import SwapFile, lost, sweep
from terrazzo.engine.offload.nvme.swap_folder import mount_of
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.layout import PAGE_BYTES, padded_bytes
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.pages import use_large_pages
from terrazzo.engine.runtime.worker import Job, Worker, again
from terrazzo.errors import Misuse, SwapChanged
from terrazzo.messages import warn
from terrazzo.processes.ending import Ending, leaves_to_parent, require_own

__all__ = ["Pending", "SwapSpace", "SwapTraffic", "page_aligned"]


@dataclass
class SwapTraffic:
    """Bytes moved, and seconds of wall time with at least one such transfer in flight.

    `recorder` is called with each block.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    recorder: Recorder = field(default=SILENT, repr=False)
    _blocks: list[int] = field(default_factory=lambda: [0, 0], repr=False)  # in flight, of reads and of writes
    _since: list[float] = field(default_factory=lambda: [0.0, 0.0], repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self, writes: bool, blocks: int) -> None:
        with self._lock:
            if not self._blocks[writes]:
                self._since[writes] = time.perf_counter()
            self._blocks[writes] += blocks

    def end(self, writes: bool, moved_bytes: int) -> None:
        with self._lock:
            self._blocks[writes] -= 1
            elapsed_s = 0.0 if self._blocks[writes] else time.perf_counter() - self._since[writes]
            if writes:
                self.written_bytes, self.write_s = self.written_bytes + moved_bytes, self.write_s + elapsed_s
            else:
                self.read_bytes, self.read_s = self.read_bytes + moved_bytes, self.read_s + elapsed_s


class Pending:
    """A transfer under way."""

    def __init__(self, blocks: Sequence[Job]) -> None:
        self._blocks = blocks

    def wait(self) -> None:
        """Return once no block is in flight any more.

        Raises:
            Exception: what went wrong with the first that failed.
        """
        failures = [failure for block in self._blocks if (failure := block.failure()) is not None]
        if failures:
            raise again(failures[0])
        self._blocks = ()


class _Block(NamedTuple):
    """A part of a transfer: `data` is memory, `position` is in `file`, `offset` in the whole space."""

    file: SwapFile
    position: int
    offset: int
    data: memoryview


class SwapSpace:
    """The space of one rank's swap files: one preallocated file per folder, blocks striped over them.

    Offsets are those of `size_bytes` in all; what was never written reads as zeros. Transfers run at once and in
    any order: whoever starts two that overlap waits for the first. After a failure all later transfers raise it again.
    A forked child has no part in it.
    """

    def __init__(self, settings: Offload, rank: int, size_bytes: int) -> None:
        """Take the space; stale files of earlier runs go first.

        Raises:
            BadInput: if a folder cannot be used.
        """
        self.size_bytes = padded_bytes(size_bytes)
        self.traffic = SwapTraffic()
        self._settings, self._block_bytes, self._reserved_bytes = settings, settings.block_bytes, 0
        self._lock = threading.Lock()
        self._digests = _Digests(self._block_bytes)
        self._failure: BaseException | None = None
        self._closed, self._process = False, os.getpid()
        sweep(settings.folders)
        self._files = _make_files(settings, rank, self.size_bytes)
        self._ending = Ending(self, functools.partial(_remove, self._files))
        leaves_to_parent(self)
        # Its jobs hold this SwapSpace: no file goes before them.
        self._worker = Worker("terrazzo-swap", threads=settings.depth)
        self._warned_of_deletion = False
        self._warn_if_buffered()

    @property
    def direct(self) -> bool:
        """Whether all files bypass the page cache."""
        return all(file.direct for file in self._files)

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    def reserve(self, count_bytes: int) -> int:
        """The offset of a region of `count_bytes` that nobody else has, a multiple of `PAGE_BYTES`."""
        with self._lock:
            start = self._reserved_bytes
            end = start + padded_bytes(count_bytes)
            if end > self.size_bytes:
                raise Misuse(
                    f"A region of {count_bytes} bytes does not fit after byte {start} of a SwapSpace of "
                    f"{self.size_bytes}: make it larger (size_bytes)."
                )
            self._reserved_bytes = end
        return start

    def read(self, offset: int, into: Tensor) -> Pending:
        """Fill `into` (1-D uint8 on the CPU, whole aligned pages) with what was written at `offset`."""
        return self._start(False, offset, into)

    def write(self, offset: int, data: Tensor) -> Pending:
        """Write `data` (as `into` of `read`), which must not change until the transfer has been waited for."""
        return self._start(True, offset, data)

    def close(self) -> None:
        """Wait for what is in flight, then remove the files. May be called twice."""
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._worker.close()
            self._ending()

    def _start(self, writes: bool, offset: int, tensor: Tensor) -> Pending:
        self._check(offset, tensor)
        blocks = list(self._cut(offset, tensor.numpy().data))
        self.traffic.begin(writes, len(blocks))
        return Pending([self._worker.submit(functools.partial(self._move, writes, block)) for block in blocks])

    def _check(self, offset: int, tensor: Tensor) -> None:
        require_own(self._process, "SwapSpace")
        if self._closed:
            raise Misuse("This SwapSpace is closed: start transfers before that.")
        if self._failure is not None:
            raise again(self._failure)
        plain = tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_cpu and tensor.is_contiguous()
        if not plain or (tensor.data_ptr() | tensor.numel() | offset) % PAGE_BYTES:
            raise Misuse(
                f"A transfer of {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} at memory address "
                f"{tensor.data_ptr():#x} and offset {offset}: expected contiguous 1-D uint8 on the CPU, with address, "
                f"length and offset multiples of {PAGE_BYTES} (see page_aligned)."
            )
        if not 0 <= offset <= offset + tensor.numel() <= self.size_bytes:
            raise Misuse(
                f"Bytes {offset} to {offset + tensor.numel()} are not within this SwapSpace's {self.size_bytes}: use "
                "an offset from reserve(), and no more bytes than were reserved."
            )
        self._warn_if_deleted()

    def _cut(self, offset: int, data: memoryview) -> Iterator[_Block]:
        """Cut at multiples of `block_bytes` of the whole space, so that each part lies in one file."""
        size, end, at = self._block_bytes, offset + len(data), offset
        while at < end:
            index, inside = divmod(at, size)
            stripe, which = divmod(index, len(self._files))
            until = min(at - inside + size, end)
            yield _Block(self._files[which], stripe * size + inside, at, data[at - offset : until - offset])
            at = until

    def _move(self, writes: bool, block: _Block) -> None:
        """One block, on an I/O thread. A failure is kept: nobody may have waited for this one."""
        moved_bytes, since = 0, time.perf_counter()
        try:
            if writes:
                self._write(block)
            else:
                self._read(block)
            moved_bytes = len(block.data)
        except BaseException as error:
            self._failure = self._failure or again(error)
            raise
        finally:
            self.traffic.end(writes, moved_bytes)
            self.traffic.recorder.moved("write" if writes else "read", since, moved_bytes)

    def _write(self, block: _Block) -> None:
        digest = zlib.crc32(block.data) if self._settings.digest else 0
        block.file.write(block.position, block.data)
        if self._settings.digest:
            self._digests.record(block.offset, len(block.data), digest)

    def _read(self, block: _Block) -> None:
        block.file.read(block.position, block.data)
        for start in self._digests.mismatches(block.offset, block.data) if self._settings.digest else ():
            position = block.position + start - block.offset
            what = "holds other bytes than were written (its digest differs)"
            raise lost(block.file.path, position, what, SwapChanged)

    def _warn_if_buffered(self) -> None:
        for file in self._files:
            if self._settings.direct and not file.direct:
                warn(
                    f"'{file.folder}' ({mount_of(file.folder).kind or 'unknown file system'}) refuses O_DIRECT: its "
                    "swap file goes through the page cache, which takes host memory. Use ext4 or xfs on a local disk, "
                    "or set offload.direct to false."
                )

    def _warn_if_deleted(self) -> None:
        gone = [] if self._warned_of_deletion else [file.path for file in self._files if file.deleted]
        if gone:
            self._warned_of_deletion = True
            warn(
                f"Someone has deleted the swap file '{gone[0]}' of a running process. It stays in use and takes its "
                "space until this process ends: nothing is lost."
            )

    def leave_to_parent(self) -> None:
        """Let go of the parent's files, in a forked child: none is locked, held or removed here."""
        if not self._closed:
            for file in self._files:
                file.leave()


class _Digests:
    """CRC-32 of what was last written, by block of the whole space and part of it."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes, self._lock = block_bytes, threading.Lock()
        self._parts: dict[int, list[tuple[int, int, int]]] = {}  # of a block: start, end, digest; no two overlap

    def record(self, offset: int, length: int, digest: int) -> None:
        end, block = offset + length, offset // self._block_bytes
        with self._lock:
            others = [part for part in self._parts.get(block, ()) if part[1] <= offset or part[0] >= end]
            self._parts[block] = [*others, (offset, end, digest)]

    def mismatches(self, offset: int, data: memoryview) -> Iterator[int]:
        """Starts of parts that were written as a whole, lie in `data` as a whole, and differ."""
        with self._lock:
            parts = self._parts.get(offset // self._block_bytes, [])
        for start, end, digest in parts:
            inside = offset <= start and end <= offset + len(data)
            if inside and zlib.crc32(data[start - offset : end - offset]) != digest:
                yield start


def page_aligned(count_bytes: int) -> Tensor:
    """Fresh zeroed uint8 memory that starts on a page.

    It may lie in large pages: direct transfers are then two to three times as fast, as the disk is handed a few long
    pieces of memory instead of one for each 4 KiB.
    """
    if not count_bytes:
        return torch.empty(0, dtype=torch.uint8, device=HOST)
    memory = mmap.mmap(-1, count_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no large pages
    return use_large_pages(torch.frombuffer(memory, dtype=torch.uint8))


def _make_files(settings: Offload, rank: int, size_bytes: int) -> list[SwapFile]:
    """A file per folder, just as long as its share of the blocks; none stays if one cannot be made."""
    name = f"terrazzo-swap-{{nonce}}-rank{rank:05d}.bin"
    folders, block_bytes = settings.folders, settings.block_bytes
    whole, rest = divmod(size_bytes, block_bytes)
    files: list[SwapFile] = []
    with ExitStack() as undo:
        undo.callback(_remove, files)
        for index, folder in enumerate(folders):
            blocks = len(range(index, whole, len(folders)))
            share = blocks * block_bytes + (rest if whole % len(folders) == index else 0)
            files.append(SwapFile(folder, name, share, settings.direct))
        undo.pop_all()
    return files


def _remove(files: Sequence[SwapFile]) -> None:
    for file in files:
        file.remove()
