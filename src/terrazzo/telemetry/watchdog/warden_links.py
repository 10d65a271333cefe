"""The connections between wardens of several machines: each reports once a second, and sees who has fallen silent.

Each has a connection to every other, on which it alone speaks, in lines of JSON that begin with a key which ranks have
exchanged. Nobody waits for anybody: the newest report of each, and when it came, can be looked at any time.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from terrazzo.socket_server import serve

__all__ = ["SILENT_S", "Report", "RunMachine", "WardenLinks", "reached_of"]

_EVERY_S = 1.0
_PATIENCE_S = 2.0
"""For a connection, or a line."""
SILENT_S = 5.0
"""Who has said nothing for so long is not counted on."""
_LONGEST = 64 << 20
"""Bytes of a line."""


class RunMachine(NamedTuple):
    """A machine of the run: its name, where its warden listens, and its ranks."""

    host: str
    address: str
    port: int
    ranks: Sequence[int]


class Report(NamedTuple):
    """What a machine has reported last.

    Attributes:
        at: when it came, in nanoseconds of this machine's clock.
        later_ns: this clock minus that one.
        message: as `WardenLinks.send` was given it there.
    """

    at: int
    later_ns: int
    message: Mapping[str, Any]


def reached_of(places: Sequence[RunMachine], own: int) -> Iterator[int]:
    """The numbers of the machines that can be connected to now, as the kernel of each answers; until one cannot."""
    for number, place in enumerate(places):
        if number == own:
            continue
        try:
            socket.create_connection((place.address, place.port), _PATIENCE_S).close()
        except OSError:  # such as a firewall: all would be waited for, one by one
            return
        yield number


class WardenLinks:
    """The connections of this machine's warden to those of all others.

    Args:
        places: of all machines, the same on each.
        own: this one's number among them.
        key: that all wardens of the run have.
        listener: a socket that listens.
        reached: machines that could be connected to before.

    Attributes:
        others: all machines but this one, by number.
    """

    def __init__(
        self, places: Sequence[RunMachine], own: int, key: str, listener: socket.socket, reached: Collection[int] = ()
    ) -> None:
        self.others = {number: place for number, place in enumerate(places) if number != own}
        self._own, self._key, self._listener = own, key, listener
        self._reports: dict[int, Report] = {}
        self._message = ""
        self._ended = threading.Event()
        self._began = time.monotonic_ns()
        self._answered = dict.fromkeys(reached, self._began)  # when the kernel of each has last done so
        self._speaking = [self._thread(self._speak, number, place) for number, place in self.others.items()]
        serve(listener, self._listen)

    def _thread(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    # -- what comes in ------------------------------------------------------------------------------------------

    def report_of(self, number: int) -> Report | None:
        """The newest report of that machine; None before the first."""
        return self._reports.get(number)

    def silent_s(self, number: int) -> float:
        """For how long nothing has been heard of a machine that has not said that it leaves; 0 for a moment."""
        report = self._reports.get(number)
        if report is not None and report.message["leaves"]:
            return 0.0
        since = (time.monotonic_ns() - (self._began if report is None else report.at)) / 1e9
        return since if since > SILENT_S else 0.0

    def unreached_s(self, number: int) -> float:
        """For how long a machine that could be connected to has answered nothing, not even that nobody listens.

        0 for a moment, and of one that never could: a firewall may be between.
        """
        if (answered := self._answered.get(number)) is None:
            return 0.0
        since = (time.monotonic_ns() - answered) / 1e9
        return since if since > SILENT_S else 0.0

    def _listen(self, caller: socket.socket) -> None:
        caller.settimeout(2 * SILENT_S)
        lines = caller.makefile("rb")
        while hmac.compare_digest(lines.readline(len(self._key) + 1).strip(), self._key.encode()):
            report = json.loads(lines.readline(_LONGEST))
            now = time.monotonic_ns()
            self._reports[int(report["machine"])] = Report(now, now - int(report["now"]), report["message"])

    # -- what goes out ------------------------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any], leaves: str = "") -> None:
        """Send this once a second from now on.

        Args:
            message: plain JSON.
            leaves: why nothing more will be sent; empty as long as that goes on.
        """
        self._message = json.dumps({**message, "leaves": leaves})

    def _lines(self) -> bytes:
        """The message in lines, with the time of this clock as it goes out."""
        if not self._message:
            return b""
        report = f'{{"machine": {self._own}, "now": {time.monotonic_ns()}, "message": {self._message}}}'
        return f"{self._key}\n{report}\n".encode()

    def leave(self, message: Mapping[str, Any], leaves: str) -> None:
        """Send this last message, as far as the others take it within a moment."""
        self.send(message, leaves)
        self._ended.set()
        deadline = time.monotonic() + _PATIENCE_S
        for thread in self._speaking:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    def _speak(self, number: int, place: RunMachine) -> None:
        while not self._ended.is_set():
            try:
                self._speak_to(number, place)
            except ConnectionRefusedError:  # nobody listens, which its kernel says
                self._has_answered(number)
            except OSError:
                pass
            self._ended.wait(_EVERY_S)

    def _speak_to(self, number: int, place: RunMachine) -> None:
        ended = False
        with socket.create_connection((place.address, place.port), _PATIENCE_S) as connection:
            self._has_answered(number)
            while not ended:
                ended = self._ended.is_set()
                connection.sendall(lines := self._lines())
                self._ended.wait(_EVERY_S)
                if lines and not _unacknowledged_bytes(connection):
                    self._has_answered(number)

    def _has_answered(self, number: int) -> None:
        if number in self._answered:
            self._answered[number] = time.monotonic_ns()


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """Bytes that the other side's kernel has not said to have."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))[0])
