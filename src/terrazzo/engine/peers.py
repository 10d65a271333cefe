"""Ranks on the same machine: reads their memory straight into this rank's, with no copy through a socket (Linux only).

The kernel copies between two processes of one user at the speed of memory (process_vm_readv, "cross-memory attach"),
several times that of a loopback socket (docs/decisions.md). A Unix socket to each such rank carries only addresses, and
the word that all has been read. Whether it works is found out once, by trying; ranks in other containers or network
namespaces count as other machines. TERRAZZO_PEER_MEMORY=0 switches it off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Memory", "Neighbour", "find_neighbours"]

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
        self._count = dict.fromkeys(lines, 0)

    def __del__(self) -> None:
        for line in self._lines.values():
            line.close()

    def offer(self, kind: str, tensor: Tensor) -> None:
        """Let it read `tensor`, which must not change until `await_taken` has returned."""
        self._count[kind] += 1
        self._send(kind, _OFFER.pack(self._count[kind], tensor.nbytes, tensor.data_ptr()))

    def offered(self, kind: str, size_bytes: int) -> Memory:
        """What it offers; waits for it. Errors: `ConnectionError` if that is not what this rank expects."""
        count, offered_bytes, address = _OFFER.unpack(self._receive(kind, _OFFER.size))
        if (count, offered_bytes) != (self._count[kind], size_bytes):
            raise ConnectionError(
                f"The rank with pid {self.pid} offers {offered_bytes} bytes in its {kind} number {count}, and this "
                f"rank expects {size_bytes} in number {self._count[kind]}: the ranks have not run the same."
            )
        return Memory(self.pid, address)

    def say_taken(self, kind: str) -> None:
        """Tell it that what it offered has been read."""
        self._send(kind, _TAKEN)

    def await_taken(self, kind: str) -> None:
        """Wait until it has read what was offered to it."""
        if self._receive(kind, len(_TAKEN)) != _TAKEN:
            raise ConnectionError(f"The rank with pid {self.pid} has not run the same as this one.")

    def hang_up(self) -> None:
        """Something has failed here: whatever it waits for will not come, and nothing further may be exchanged."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _send(self, kind: str, message: bytes) -> None:
        try:
            self._lines[kind].send(message)
        except OSError as error:
            raise ConnectionError(f"The rank with pid {self.pid} has ended or failed.") from error

    def _receive(self, kind: str, size_bytes: int) -> bytes:
        try:
            message = self._lines[kind].recv(size_bytes)
        except TimeoutError as error:
            raise ConnectionError(f"The rank with pid {self.pid} has not come to this {kind} in time.") from error
        except OSError:
            message = b""
        if len(message) != size_bytes:
            raise ConnectionError(f"The rank with pid {self.pid} has ended or failed.")
        return message


_OFFER, _TAKEN = struct.Struct("<QQQ"), b"taken"


def find_neighbours(
    rank: int, all_gather: Callable[[Tensor], Tensor], kinds: Sequence[str], timeout_s: float
) -> dict[int, Neighbour]:
    """Those ranks of a group that can read this one's memory and whose memory it can read.

    Args:
        rank: of this process in the group.
        all_gather: every rank's 1-D int64 tensor, as rows; blocks.
        kinds: of exchanges that may go on at the same time.
        timeout_s: longest wait for a message.
    """
    secret = torch.tensor([int.from_bytes(os.urandom(7), "little")])
    machine, door = _machine(), None
    if machine:
        _permit_siblings()
        door = _listen(int(secret), timeout_s)
    rows = all_gather(torch.tensor([machine if door else 0, os.getpid(), secret.data_ptr(), int(secret)])).tolist()
    near = [
        other != rank and bool(there) and there == rows[rank][0] and _reads(Memory(pid, address), expected)
        for other, (there, pid, address, expected) in enumerate(rows)
    ]
    mutual = all_gather(torch.tensor(near, dtype=torch.int64)).tolist()
    pids = {other: rows[other][1] for other, reads in enumerate(near) if reads and mutual[other][rank]}
    lines: dict[int, dict[str, socket.socket]] = {other: {} for other in pids}
    for other in pids:
        if other > rank:
            lines[other] |= {kind: _call(rows[other][3], number, timeout_s) for number, kind in enumerate(kinds)}
    if door is not None:
        with contextlib.closing(door):
            _answer(door, {pid: lines[other] for other, pid in pids.items() if other < rank}, kinds)
    return {other: Neighbour(pid, lines[other]) for other, pid in pids.items()}


def _listen(secret: int, timeout_s: float) -> socket.socket | None:
    """A socket that neighbours can call; None where the system does not allow it."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(_name(secret))
        door.listen(1024)
    except OSError:
        door.close()
        return None
    door.settimeout(timeout_s)
    return door


def _call(secret: int, number: int, timeout_s: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(timeout_s)
    line.connect(_name(secret))
    line.send(bytes([number]))
    return line


def _answer(door: socket.socket, lines: Mapping[int, dict[str, socket.socket]], kinds: Sequence[str]) -> None:
    """Take one call of each kind from every caller, by pid; hang up on strangers."""
    while any(len(found) < len(kinds) for found in lines.values()):
        line = door.accept()[0]
        line.settimeout(door.gettimeout())
        pid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if pid in lines:
            lines[pid][kinds[line.recv(1)[0]]] = line
        else:
            line.close()


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
    if _libc is not None and os.getppid() > 1:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
