"""How ranks of one machine get connected: each listens on a Unix socket and connects to those of later ranks.

The name of a socket can be read by every local user. So calls are tried again while others fill the queue, callers that
are of another user or lack the key are sent away, and nobody is waited for while there is something else to do. What is
not connected in time is left out; nothing here aborts a start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Address", "Listener", "Met", "connect"]

_HELLO, _WELCOME = struct.Struct("<5q"), struct.Struct("<2q")
_QUEUE = 1024
"""Callers that may wait in its queue; the system may allow fewer."""
_MOST_SILENT = 256
"""Callers that have not said who they are; the oldest goes for a further one."""
_AT_ONCE = 64
"""Callers let in before own calls have their turn."""
_RETRY_S = 0.002


class Address(NamedTuple):
    """The address of a rank: the number in its listener's name, which is public, and the key, which is not."""

    number: int
    key: int


class Probe(NamedTuple):
    """A number in a process's memory, for others to try whether they can read it."""

    address: int
    value: int


@dataclass
class Met:
    """A rank that has been connected: its pid, a number in its memory, and a line for each kind of exchange."""

    pid: int = 0
    probe: Probe = field(default_factory=lambda: Probe(0, 0))
    lines: dict[str, socket.socket] = field(default_factory=dict)

    def hang_up(self) -> None:
        for line in self.lines.values():
            line.close()


class Listener:
    """A socket that ranks of this machine can connect to, in Linux's abstract namespace: no file, and gone with it.

    Raises:
        OSError: where the system does not allow it.
    """

    def __init__(self) -> None:
        self.address = Address(secrets.randbits(56), secrets.randbits(62))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.bind(_name(self.address))
            self.socket.listen(_QUEUE)
        except OSError:
            self.socket.close()
            raise
        self.socket.setblocking(False)


def connect(
    rank: int,
    listener: Listener,
    others: Mapping[int, Address],
    kinds: Sequence[str],
    probe: tuple[int, int],
    timeout_s: float,
) -> dict[int, Met]:
    """Connect with the ranks `others` of this machine, all of which do the same; the listener is closed then.

    Args:
        rank: of this process.
        kinds: of exchanges; each gets a line of its own.
        probe: address and value of a number in this process's memory.
        timeout_s: how long to try.

    Returns:
        Those with which every line was established, as far as this rank knows: the other one may have given up.
    """
    meeting = _Meeting(rank, listener, others, kinds, Probe(*probe))
    try:
        meeting.go_on(time.monotonic() + timeout_s)
    finally:
        meeting.close()
    return {other: met for other, met in meeting.met.items() if len(met.lines) == len(kinds)}


class _Meeting:
    """One rank's part of `connect`: whom it still has to call, and how many calls it still expects."""

    def __init__(
        self, rank: int, listener: Listener, others: Mapping[int, Address], kinds: Sequence[str], probe: Probe
    ) -> None:
        self.rank, self.listener, self.others, self.kinds, self.probe = rank, listener, others, kinds, probe
        self.met = {other: Met() for other in others}
        self._to_call = {(other, kind) for other in others if other > rank for kind in kinds}
        self._called: dict[socket.socket, tuple[int, str]] = {}
        self._silent: dict[socket.socket, None] = {}
        self._expected = sum(other < rank for other in others) * len(kinds)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)

    def go_on(self, deadline: float) -> None:
        while (self._to_call or self._called or self._expected) and (left_s := deadline - time.monotonic()) > 0:
            for other, kind in sorted(self._to_call):
                self._call(other, kind)
            for key, _ in self._selector.select(min(left_s, _RETRY_S) if self._to_call else left_s):
                line = key.fileobj
                assert isinstance(line, socket.socket)
                if line is self.listener.socket:
                    self._let_in()
                elif line in self._called:
                    self._hear_welcome(line)
                elif line in self._silent:  # else it has just been sent away
                    self._hear_hello(line)

    def close(self) -> None:
        self._selector.close()
        for line in [self.listener.socket, *self._called, *self._silent]:
            line.close()
        for met in self.met.values():
            if len(met.lines) < len(self.kinds):
                met.hang_up()

    # -- calling -----------------------------------------------------------------------------------------------

    def _call(self, other: int, kind: str) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        try:
            line.connect(_name(self.others[other]))
            line.send(_HELLO.pack(self.others[other].key, self.rank, self.kinds.index(kind), *self.probe))
        except BlockingIOError:  # the queue before the listener is full
            line.close()
            return
        except OSError:  # the listener is closed: the other one has given up
            line.close()
            self._to_call.discard((other, kind))
            return
        self._to_call.discard((other, kind))
        self._called[line] = (other, kind)
        self._selector.register(line, selectors.EVENT_READ)

    def _hear_welcome(self, line: socket.socket) -> None:
        other, kind = self._called.pop(line)
        message = self._hear(line)
        if len(message) == _WELCOME.size and _is_own_user(line):
            self._connect(other, kind, line, Probe(*_WELCOME.unpack(message)))
        else:  # sent away, in a crowd perhaps
            line.close()
            self._to_call.add((other, kind))

    # -- being called ------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                line = self.listener.socket.accept()[0]
            except OSError:  # nobody is there any more, or too many files are open
                return
            if not _is_own_user(line):
                line.close()
                continue
            line.setblocking(False)
            self._silent[line] = None
            self._selector.register(line, selectors.EVENT_READ)
            if len(self._silent) > _MOST_SILENT:
                self._send_away(next(iter(self._silent)))

    def _send_away(self, line: socket.socket) -> None:
        del self._silent[line]
        self._selector.unregister(line)
        line.close()

    def _hear_hello(self, line: socket.socket) -> None:
        del self._silent[line]
        message = self._hear(line)
        if len(message) == _HELLO.size:
            key, other, number, *probe = _HELLO.unpack(message)
            known = key == self.listener.address.key and other in self.others and other < self.rank
            kind = self.kinds[number] if 0 <= number < len(self.kinds) else None
            if known and kind is not None and kind not in self.met[other].lines:
                with contextlib.suppress(OSError):
                    line.send(_WELCOME.pack(*self.probe))
                    self._connect(other, kind, line, Probe(*probe))
                    self._expected -= 1
                    return
        line.close()

    def _hear(self, line: socket.socket) -> bytes:
        """The one message that is expected; empty if the other end is closed."""
        self._selector.unregister(line)
        try:
            return line.recv(_HELLO.size + 1)
        except OSError:
            return b""

    def _connect(self, other: int, kind: str, line: socket.socket, probe: Probe) -> None:
        met = self.met[other]
        met.pid, met.probe, met.lines[kind] = _credentials(line)[0], probe, line


def _credentials(line: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end, as the kernel has them."""
    pid, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _is_own_user(line: socket.socket) -> bool:
    return _credentials(line)[1] == os.geteuid()


def _name(address: Address) -> str:
    return f"\0terrazzo-{address.number:x}"
