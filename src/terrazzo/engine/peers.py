"""Ranks on the same machine: reads their memory straight into this rank's, with no copy through a socket (Linux only).

The kernel copies between two processes of one user at the speed of memory (process_vm_readv, "cross-memory attach"),
ten times that of a loopback socket (docs/decisions.md). A Unix socket to each such rank carries only addresses, and the
word that all has been read. Whether it works is found out once, by trying; ranks in other containers or network
namespaces count as other machines. TERRAZZO_PEER_MEMORY=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

__all__ = ["Memory", "Neighbour", "Worker", "find_neighbours"]

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


class Neighbour:
    """A rank on this machine, and a socket to it for each kind of exchange.

    In an exchange each of the two sends the address of what it offers, reads what the other one offers, and says so.
    """

    def __init__(self, pid: int, lines: Mapping[str, socket.socket]) -> None:
        self.pid, self._lines = pid, lines

    def __del__(self) -> None:
        for line in self._lines.values():
            line.close()

    def offer(self, kind: str, tensor: Tensor) -> None:
        """Let it read `tensor`, which must not change until `await_taken` has returned."""
        self._lines[kind].send(tensor.data_ptr().to_bytes(8, "little"))

    def offered(self, kind: str) -> Memory:
        """What it offers; waits for it."""
        return Memory(self.pid, int.from_bytes(self._receive(kind), "little"))

    def say_taken(self, kind: str) -> None:
        """Tell it that what it offered has been read."""
        self._lines[kind].send(b"taken")

    def await_taken(self, kind: str) -> None:
        """Wait until it has read what was offered to it."""
        self._receive(kind)

    def _receive(self, kind: str) -> bytes:
        message = self._lines[kind].recv(8)
        if not message:
            raise ConnectionError(f"The rank with pid {self.pid} has ended.")
        return message


def find_neighbours(rank: int, all_gather: Callable[[Tensor], Tensor], kinds: Sequence[str]) -> dict[int, Neighbour]:
    """Those ranks of a group that can read this one's memory and whose memory it can read.

    Args:
        rank: of this process in the group.
        all_gather: every rank's 1-D int64 tensor, as rows; blocks.
        kinds: of exchanges that may go on at the same time.
    """
    _permit_siblings()
    secret = torch.tensor([int.from_bytes(os.urandom(7), "little")])
    machine = _machine()
    with closing(_listen(int(secret)) if machine else socket.socket()) as door:
        rows = all_gather(torch.tensor([machine, os.getpid(), secret.data_ptr(), int(secret)])).tolist()
        readable = [
            machine == there != 0 and other != rank and _reads(Memory(pid, address), expected)
            for other, (there, pid, address, expected) in enumerate(rows)
        ]
        mutual = all_gather(torch.tensor(readable, dtype=torch.int64)).tolist()
        found = [other for other, reads in enumerate(readable) if reads and mutual[other][rank]]
        lines: dict[int, dict[str, socket.socket]] = {rows[other][1]: {} for other in found}
        for other in found:
            for number, kind in enumerate(kinds) if other > rank else ():
                lines[rows[other][1]][kind] = _connect(rows[other][3], number)
        for _ in range(sum(other < rank for other in found) * len(kinds)):
            pid, number, line = _accept(door)
            lines[pid][kinds[number]] = line
    return {other: Neighbour(rows[other][1], lines[rows[other][1]]) for other in found}


def _listen(secret: int) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(_name(secret))
    door.listen(1024)
    return door


def _connect(secret: int, number: int) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(_name(secret))
    line.send(bytes([number]))
    return _with_timeout(line)


def _accept(door: socket.socket) -> tuple[int, int, socket.socket]:
    """The pid of the caller, the number it says, and the line to it."""
    line = _with_timeout(door.accept()[0])
    pid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid, line.recv(1)[0], line


def _with_timeout(line: socket.socket) -> socket.socket:
    line.settimeout(default_pg_timeout.total_seconds())
    return line


def _name(secret: int) -> str:
    """In Linux's abstract namespace: no file, and gone with the socket."""
    return f"\0terrazzo-{secret:x}"


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
