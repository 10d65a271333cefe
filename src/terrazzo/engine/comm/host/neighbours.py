"""Ranks on the same machine: reads their memory straight into this rank's, with no copy through a socket (Linux only).

The kernel copies between two processes of one user at the speed of memory (process_vm_readv, "cross-memory attach"),
several times that of a loopback socket (docs/decisions.md). A Unix socket to each such rank carries only addresses, and
the word that all has been read; `rendezvous` connects them. Whether it works is found out once, by trying; ranks in
other containers or network namespaces count as other machines. TERRAZZO_PEER_MEMORY=0 switches it off.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import struct
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.host.rendezvous import Address, Listener, Met, connect
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.rank_places import PlacesDiffer, RankPlace
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import ConnectionLost, TimedOut
from terrazzo.processes.ending import Ending, leaves_to_parent
from terrazzo.processes.system import boot_id, is_stopped

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
    """Memory of another process, from `address` on; `owner` is what errors call that process."""

    def __init__(self, pid: int, address: int, owner: str = "another process") -> None:
        self.pid, self.address, self.owner = pid, address, owner

    def read(self, start_bytes: int, into: Tensor) -> Tensor:
        """Fill the contiguous tensor `into` with what lies `start_bytes` after the address; returns it."""
        done, size_bytes = 0, into.nbytes
        while done < size_bytes:
            target = _Span(into.data_ptr() + done, size_bytes - done)
            source = _Span(self.address + start_bytes + done, size_bytes - done)
            count = _read_from(self.pid, ctypes.byref(target), _ONE, ctypes.byref(source), _ONE, _NO_FLAGS)
            if count <= 0:
                error = ctypes.get_errno()
                kind, edit = ConnectionError, _GO_WITHOUT
                if error == errno.ESRCH:
                    kind, edit = ConnectionLost, f"it has ended, {_LOOK_THERE}"
                raise kind(f"The memory of {self.owner} cannot be read: {os.strerror(error)}; {edit}")
            done += count
        return into


class _Permission:
    """Permission for other ranks to read this one's memory, where the Yama security module guards processes.

    They may while anybody holds it: this process's parent then, and all that it has started, of the same user, may
    attach to this process as a debugger does. Each read needs it. So a search for neighbours holds it, and each
    neighbour until it is gone.
    """

    def __init__(self) -> None:
        self.leave_to_parent()
        leaves_to_parent(self)

    def leave_to_parent(self) -> None:
        """Forget who reads this memory, in a forked child, which nobody has been permitted to read."""
        self._lock, self._holders = threading.Lock(), 0

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                _set_ptracer(os.getppid())

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                _set_ptracer(0)

    @contextlib.contextmanager
    def granted(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()


def _set_ptracer(pid: int) -> None:
    """Whom this process permits, with all descendants; 0: nobody. Process 1, an orphan's parent, is never permitted."""
    if _libc is not None and pid != 1:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


_permission = _Permission()


class Neighbour:
    """A rank on this machine, and a socket to it for each kind of exchange.

    In an exchange each of the two sends the address of what it offers, reads what the other one offers, and says so.

    Args:
        rank: which one it is among all.

    Attributes:
        name: what errors call it, such as `rank 3`.
    """

    def __init__(self, rank: int, pid: int, lines: Mapping[str, socket.socket]) -> None:
        self._rank, self.name, self.pid, self._lines = rank, f"rank {rank}", pid, lines
        _permission.hold()
        self._ending = Ending(self, functools.partial(_take_leave, list(lines.values()), _permission))
        leaves_to_parent(self)

    def leave_to_parent(self) -> None:
        """Close the lines, in a forked child: the other rank is to hear at once when this child's parent ends."""
        _close(list(self._lines.values()))

    def offer(self, kind: str, tensor: Tensor, label: Label) -> None:
        """Let it read `tensor`, which must not change until `await_taken` has returned."""
        self._send(kind, _OFFER.pack(label.code, tensor.nbytes, tensor.data_ptr()))

    def offered(self, kind: str, size_bytes: int, label: Label) -> Memory:
        """The memory that it offers; waits for it.

        Raises:
            PlacesDiffer: if that is not what this rank expects.
        """
        code, offered_bytes, address = _OFFER.unpack(self._receive(kind, _OFFER.size))
        label.check(size_bytes, self._rank, code, offered_bytes)
        return Memory(self.pid, address, self.name)

    def say_taken(self, kind: str) -> None:
        """Tell it that what it offered has been read."""
        self._send(kind, _TAKEN)

    def await_taken(self, kind: str, label: Label) -> None:
        """Wait until it has read what was offered to it."""
        if self._receive(kind, len(_TAKEN)) != _TAKEN:
            raise PlacesDiffer({dist.get_rank(): label.place(), self._rank: RankPlace("what comes next", label.edit)})

    def hang_up(self) -> None:
        """Something has failed here: whatever it waits for will not come, and nothing further may be exchanged."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    @property
    def why_stopped(self) -> str | None:
        """A note on its process if that stands still; None if it does not."""
        if not is_stopped(self.pid):
            return None
        return (
            f"its process {self.pid} is stopped by a signal (SIGSTOP, Ctrl-Z or a debugger). See who stops processes "
            "here, and start all ranks again; one that `kill -CONT` wakes in time goes on."
        )

    @property
    def _subject(self) -> str:
        return self.name[0].upper() + self.name[1:]

    @property
    def _gone(self) -> ConnectionLost:
        return ConnectionLost(f"{self._subject} has ended or failed: {_LOOK_THERE}")

    def _send(self, kind: str, message: bytes) -> None:
        try:
            self._lines[kind].send(message)
        except OSError as error:
            raise self._gone from error

    def _receive(self, kind: str, size_bytes: int) -> bytes:
        try:
            message = self._lines[kind].recv(size_bytes)
        except TimeoutError as error:
            why = self.why_stopped or (
                f"it may have ended, or run something else: {_LOOK_THERE} Where it is only slow, give "
                "init_process_group a longer timeout."
            )
            raise TimedOut(f"{self._subject} has not come to this {kind} in time: {why}") from error
        except OSError:
            message = b""
        if len(message) != size_bytes:
            raise self._gone
        return message


def _close(lines: Sequence[socket.socket]) -> None:
    for line in lines:
        line.close()


def _take_leave(lines: Sequence[socket.socket], permission: _Permission) -> None:
    """Nothing is exchanged with a neighbour any more."""
    _close(lines)
    permission.release()


_OFFER, _TAKEN = struct.Struct("<QQQ"), b"taken"


def find_neighbours(
    rank: int,
    ranks: Sequence[int],
    all_gather: Callable[[Tensor], Tensor],
    kinds: Sequence[str],
    timeout_s: float,
) -> dict[int, Neighbour]:
    """Ranks of a group that can read this one's memory and whose memory it can read; collective.

    All ranks exchange machine and address, three numbers each. The rest passes between ranks of one machine, but for a
    last word about who can read whom there. Two ranks that do not get connected, for whatever reason, use sockets.

    Args:
        rank: of this process in the group.
        ranks: which ones those of the group are among all.
        all_gather: every rank's 1-D int64 tensor, as rows; blocks.
        kinds: of exchanges that may go on at the same time.
        timeout_s: longest wait for a message. Getting connected may take a quarter of it, and half a minute at most.
    """
    machine = _machine()
    listener = _listen() if machine else None
    with contextlib.nullcontext() if listener is None else _permission.granted():
        address = listener.address if listener is not None else (0, 0)
        rows = all_gather(torch.tensor([machine if listener else 0, *address], device=HOST)).tolist()
        on_machine = [other for other, row in enumerate(rows) if row[0] and row[0] == rows[rank][0]]
        met: dict[int, Met] = {}
        secret = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=HOST)
        if listener is not None:
            others = {other: Address(*rows[other][1:]) for other in on_machine if other != rank}
            probe = secret.data_ptr(), int(secret)
            met = connect(rank, listener, others, kinds, probe, min(timeout_s / 4, _PATIENCE_S))
        reads = {
            other for other, there in met.items() if _reads(Memory(there.pid, there.probe.address), there.probe.value)
        }
        agreed = reads & _readers(rank, all_gather, [row[0] for row in rows], reads)
        neighbours = {}
        for other, there in met.items():
            if other not in agreed:
                there.hang_up()
                continue
            for line in there.lines.values():
                line.settimeout(timeout_s)
            neighbours[other] = Neighbour(ranks[other], there.pid, there.lines)
        return neighbours


_LOOK_THERE = "see what it has printed."
_GO_WITHOUT = "set TERRAZZO_PEER_MEMORY=0 for every rank, so that they exchange through sockets."
_PATIENCE_S = 30.0
_WORD_BITS = 62


def _readers(
    rank: int, all_gather: Callable[[Tensor], Tensor], machines: Sequence[int], reads: Collection[int]
) -> set[int]:
    """The ranks of this machine that can read this one, where `reads` are those that it can: one bit each."""
    on_machine: dict[int, list[int]] = defaultdict(list)
    for other, machine in enumerate(machines):
        on_machine[machine].append(other)
    on_machine.pop(0, None)  # those that read nobody
    longest = max(map(len, on_machine.values()), default=1)
    same_machine = on_machine.get(machines[rank], [])
    words = [0] * -(-longest // _WORD_BITS)
    for position, other in enumerate(same_machine):
        words[position // _WORD_BITS] |= (other in reads) << position % _WORD_BITS
    words_of_ranks = all_gather(torch.tensor(words, device=HOST)).tolist()
    word, bit = divmod(same_machine.index(rank), _WORD_BITS) if same_machine else (0, 0)
    return {other for other in same_machine if words_of_ranks[other][word] >> bit & 1}


def _listen() -> Listener | None:
    try:
        return Listener()
    except OSError:
        return None


def _reads(memory: Memory, expected: int) -> bool:
    try:
        return int(memory.read(0, torch.zeros(1, dtype=torch.int64, device=HOST))) == expected
    except ConnectionError:
        return False


def _machine() -> int:
    """A number that processes share which see the same kernel, pids and network; 0 for none."""
    boot = boot_id()
    if _read_from is None or not boot or os.environ.get("TERRAZZO_PEER_MEMORY") == "0":
        return 0
    try:
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return 0
    return zlib.crc32(f"{boot} {spaces}".encode()) + 1
