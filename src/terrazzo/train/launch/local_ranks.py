"""The ranks that this process starts: processes that end with it, and pipes on which they say how they fare.

Nothing of this is in the file system, so that nothing can stay behind there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist

from terrazzo.tether import tethered
from terrazzo.train.launch.failure import PREEMPTED, REPORT, SIBLING_GRACE_S, Failure

__all__ = ["LocalRank", "LocalRanks", "Signals"]

_POLL_S = 0.1
_UNKILLABLE_S = 10.0  # the kernel may keep a killed process for as long as a device or file system does not answer


class Signals:
    """Signals that arrive from its creation to `restore`, for whoever looks into `received`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in (signal.SIGHUP, signal.SIGQUIT):
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:  # as nohup has it
                self._before[number] = before
        for number in self._before:
            signal.signal(number, self._receive)

    def restore(self) -> None:
        """Let them do what they did before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


class LocalRank:
    """The process of one rank. `code` is its exit code, negative for a signal, once it has ended, `ended_ns` when.

    That is on the clock of a `Failure`, and as seen from here: late by what it takes to look.
    """

    def __init__(self, rank: int, environment: dict[str, str], arguments: Sequence[str]) -> None:
        self.rank, self.begun, self.ended_by_us = rank, False, False
        self.code: int | None = None
        self.ended_ns: int | None = None
        self.failure: Failure | None = None
        self.line, theirs = os.pipe()
        self._unread = b""
        try:
            os.set_blocking(self.line, False)
            self._process = subprocess.Popen(
                tethered(*arguments),
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), REPORT: str(theirs)},
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
            )
        finally:
            os.close(theirs)

    def read(self) -> bool:
        """Take in what it says; False when it will say no more."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.line, 1 << 16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._heard(json.loads(line))
            self._note_end()  # sooner than the system has its exit code
            return False
        return True

    def poll(self) -> None:
        """See whether it has ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = code
            self._note_end()

    def send(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, unless it has ended by itself."""
        self.poll()
        if self.code is None:
            self.ended_by_us = True
            self._process.kill()

    def _note_end(self) -> None:
        self.ended_ns = self.ended_ns or time.monotonic_ns()

    def _heard(self, said: dict[str, object]) -> None:
        self.begun = self.begun or "begun" in said
        if isinstance(failure := said.get("failure"), dict):
            self.failure = Failure(**failure)


class LocalRanks:
    """All ranks of a run on this machine, each running `python ARGUMENTS`. Leaving its `with` ends those that are left.

    They meet at a store that this process serves, on a port that the system chooses.
    """

    def __init__(self, count: int, arguments: Sequence[str]) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = os.environ | {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 does not serve a store of its own
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self.ranks: list[LocalRank] = []
        self._lines = selectors.DefaultSelector()
        try:
            for number in range(count):
                self.ranks.append(rank := LocalRank(number, environment, arguments))
                self._lines.register(rank.line, selectors.EVENT_READ, rank)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self, signals: Signals) -> int | None:
        """Until all have ended; the signal that ended the run at once, if one did.

        The first signal asks for a stop. When a rank fails, the others have some seconds to fail by themselves.
        """
        heeded, deadline = 0, float("inf")
        while any(rank.code is None for rank in self.ranks):
            self._listen(_POLL_S)
            if len(signals.received) > heeded:
                number = signals.received[heeded]
                heeded += 1
                asks = number in (signal.SIGTERM, signal.SIGINT) and any(rank.begun for rank in self.ranks)
                if heeded > 1 or not asks:
                    return number
                self._ask_for_stop()
            if deadline == float("inf") and any(rank.code not in (None, 0, PREEMPTED) for rank in self.ranks):
                saying = any(rank.begun and rank.code is None for rank in self.ranks)  # others have nothing to say yet
                deadline = time.monotonic() + (SIBLING_GRACE_S if saying else 0.0)
            if time.monotonic() > deadline:
                break
        return None

    def end(self) -> None:
        """Kill those that are left, and wait for them as long as that can help."""
        for rank in self.ranks:
            rank.end()
        deadline = time.monotonic() + _UNKILLABLE_S
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
            self._listen(_POLL_S)
        self._listen(0.0)
        self._lines.close()
        for rank in self.ranks:
            os.close(rank.line)

    def _ask_for_stop(self) -> None:
        """One rank is enough, but those that have not begun would die of the signal."""
        for rank in self.ranks:
            if rank.begun:
                rank.send(signal.SIGTERM)

    def _listen(self, patience_s: float) -> None:
        """Take in what ranks say within that time, and see who has ended."""
        for key, _ in self._lines.select(patience_s):
            if not key.data.read():
                self._lines.unregister(key.fileobj)
        for rank in self.ranks:
            rank.poll()
