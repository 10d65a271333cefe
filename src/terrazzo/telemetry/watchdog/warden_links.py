"""The connections between wardens of several machines: each reports once a second, and sees who has fallen silent.

Each warden has a connection to every other one, on which only it sends: pairs of lines, a key that the ranks have
exchanged and a report in JSON. Nobody waits for anybody: the newest report of each, and when it came, is kept.
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

from terrazzo.processes.socket_server import serve

__all__ = ["SILENT_S", "Report", "RunMachine", "WardenLinks", "reached_of"]

_EVERY_S = 1.0
_PATIENCE_S = 2.0
"""Seconds for a connection to be made, or a line to be sent."""
SILENT_S = 5.0
"""A machine that has not been heard for so many seconds counts as silent."""
_LONGEST = 64 << 20
"""Most bytes of a line."""


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
        later_ns: this machine's clock minus the other one's.
        message: what `WardenLinks.send` was given there.
    """

    at: int
    later_ns: int
    message: Mapping[str, Any]


def reached_of(places: Sequence[RunMachine], own: int) -> Iterator[int]:
    """The numbers of the machines whose kernels accept a connection now. Stops at the first that does not."""
    for number, place in enumerate(places):
        if number == own:
            continue
        try:
            socket.create_connection((place.address, place.port), _PATIENCE_S).close()
        except OSError:  # such as a firewall, which would have each of them waited for
            return
        yield number


class WardenLinks:
    """The connections of this machine's warden to those of all others.

    Args:
        places: all machines of the run, in the same order everywhere.
        own: this machine's number among them.
        key: the secret that all wardens of the run know.
        listener: a listening socket.
        reached: numbers of machines that `reached_of` has found.

    Attributes:
        others: all machines but this one, by number.
    """

    def __init__(
        self, places: Sequence[RunMachine], own: int, key: str, listener: socket.socket, reached: Collection[int] = ()
    ) -> None:
        self.others = {number: place for number, place in enumerate(places) if number != own}
        self._own, self._key = own, key
        self._reports: dict[int, Report] = {}
        self._message = ""
        self._ended = threading.Event()
        self._began = time.monotonic_ns()
        self._answered = dict.fromkeys(reached, self._began)  # when the kernel of each has last done so
        self._speaking = [self._thread(self._speak, number, place) for number, place in self.others.items()]
        self._close = serve(listener, self._listen)

    def _thread(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread

    # -- what comes in ------------------------------------------------------------------------------------------

    def report_of(self, number: int) -> Report | None:
        """The newest report of that machine; None before the first."""
        return self._reports.get(number)

    def silent_s(self, number: int) -> float:
        """Seconds for which a machine has not been heard; 0 if these are few, or it has said that it leaves."""
        report = self._reports.get(number)
        if report is not None and report.message["leaves"]:
            return 0.0
        since = (time.monotonic_ns() - (self._began if report is None else report.at)) / 1e9
        return since if since > SILENT_S else 0.0

    def unreached_s(self, number: int) -> float:
        """Seconds for which not even the kernel of a machine has answered.

        0 if these are few, and for a machine that was never reached: a firewall may be between.
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
        """Send this message once a second from now on.

        Args:
            message: plain values for JSON.
            leaves: why this is the last message; empty if it is not.
        """
        self._message = json.dumps({**message, "leaves": leaves})

    def _lines(self) -> bytes:
        """The message as it is sent, with the present time of this machine's clock."""
        if not self._message:
            return b""
        report = f'{{"machine": {self._own}, "now": {time.monotonic_ns()}, "message": {self._message}}}'
        return f"{self._key}\n{report}\n".encode()

    def leave(self, message: Mapping[str, Any], leaves: str) -> None:
        """Send the last message, to those that take it within `_PATIENCE_S`."""
        self.send(message, leaves)
        self._ended.set()
        deadline = time.monotonic() + _PATIENCE_S
        for thread in self._speaking:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close()

    def _speak(self, number: int, place: RunMachine) -> None:
        while not self._ended.is_set():
            try:
                self._speak_to(number, place)
            except ConnectionRefusedError:  # its kernel says that nobody listens
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
    """Bytes that the other side's kernel has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))[0])
