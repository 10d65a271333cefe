"""Ranks on the same machine: reads their memory straight into this rank's, with no socket between (Linux only).

The kernel copies between two processes of one user at the speed of memory (process_vm_readv, "cross-memory attach"),
ten times that of a loopback socket (docs/decisions.md). Whether it may is found out once, by trying; ranks in other
containers or network namespaces count as other machines. TERRAZZO_PEER_MEMORY=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Memory", "Worker", "readable_peers"]

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_read_from: Any = getattr(_libc, "process_vm_readv", None)
if _read_from is not None:
    _read_from.restype = ctypes.c_ssize_t
_ONE, _NO_FLAGS = ctypes.c_ulong(1), ctypes.c_ulong(0)


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t)]


class Memory:
    """Memory of another process, from `address` on."""

    def __init__(self, pid: int, address: int) -> None:
        self.pid, self.address = pid, address

    def read(self, start_bytes: int, into: Tensor) -> Tensor:
        """Fill the contiguous tensor `into` with what lies `start_bytes` behind the address; returns it."""
        done, size_bytes = 0, into.nbytes
        while done < size_bytes:
            here = _Span(into.data_ptr() + done, size_bytes - done)
            there = _Span(self.address + start_bytes + done, size_bytes - done)
            count = _read_from(self.pid, ctypes.byref(here), _ONE, ctypes.byref(there), _ONE, _NO_FLAGS)
            if count <= 0:
                error = ctypes.get_errno()
                raise ConnectionError(f"Cannot read the memory of the rank with pid {self.pid}: {os.strerror(error)}.")
            done += count
        return into


def readable_peers(rank: int, all_gather: Callable[[Tensor], Tensor]) -> dict[int, int]:
    """The pids of those ranks of a group that can read this one's memory and whose memory it can read.

    Args:
        rank: of this process in the group.
        all_gather: every rank's 1-D int64 tensor, as rows; blocks.
    """
    _permit_siblings()
    secret = torch.tensor([int.from_bytes(os.urandom(7))])
    rows = all_gather(torch.tensor([_machine(), os.getpid(), secret.data_ptr(), int(secret)])).tolist()
    here = rows[rank][0]
    readable = [
        machine == here != 0 and other != rank and _reads(Memory(pid, address), expected)
        for other, (machine, pid, address, expected) in enumerate(rows)
    ]
    mutual = all_gather(torch.tensor(readable, dtype=torch.int64)).tolist()
    return {other: rows[other][1] for other, reads in enumerate(readable) if reads and mutual[other][rank]}


def _reads(memory: Memory, expected: int) -> bool:
    try:
        return int(memory.read(0, torch.zeros(1, dtype=torch.int64))) == expected
    except ConnectionError:
        return False


def _machine() -> int:
    """A number that processes share which see the same kernel, pids and network; 0 for none."""
    if _read_from is None or os.environ.get("TERRAZZO_PEER_MEMORY") == "0":
        return 0
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return 0
    return zlib.crc32(f"{boot} {spaces}".encode()) + 1


def _permit_siblings() -> None:
    """Where the Yama security module guards processes, let those that this one's parent started read its memory."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


class Job(Future[None]):
    """Something that a `Worker` will have done."""

    def wait(self) -> None:
        """Return once it is done. Errors: what it raised."""
        self.result()


class Worker:
    """A thread that does jobs one after the other, in the order they came; it ends with the object."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None] = queue.SimpleQueue()
        # A daemon: a rank that has lost a peer must be able to exit while a job waits for it.
        self.thread = threading.Thread(target=_work, args=(self._jobs,), name="terrazzo-peers", daemon=True)
        self.thread.start()

    def __del__(self) -> None:
        self._jobs.put(None)

    def submit(self, job: Callable[[], None]) -> Job:
        done = Job()
        self._jobs.put((done, job))
        return done


def _work(jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None]) -> None:
    with torch.no_grad():
        while (item := jobs.get()) is not None:
            done, job = item
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:
                failure = error
            del item, job  # its tensors must be gone when it counts as done
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
