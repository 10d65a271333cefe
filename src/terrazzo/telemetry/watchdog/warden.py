"""The process that watches ranks which the launcher did not start: `python -m terrazzo.telemetry.watchdog.warden`.

As a process of its own it is not held up by the ranks' interpreters and devices, and it shares the memory that they
record into, so that it can read it when they are gone. It ends with the last of its ranks.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.exit_codes import FAILED, STALLED
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.processes.system import (
    birth_of,
    is_stopped,
    is_traced,
    processor_s,
    state_of,
    waits_for_drive,
)
from terrazzo.telemetry.watchdog.evidence import Suspect, keep_evidence
from terrazzo.telemetry.watchdog.memory_kills import MemoryKills
from terrazzo.telemetry.watchdog.other_machines import OtherMachines
from terrazzo.telemetry.watchdog.recording import ASK, Recording
from terrazzo.telemetry.watchdog.stall import GONE, Stall
from terrazzo.telemetry.watchdog.warden_links import RunMachine, WardenLinks
from terrazzo.telemetry.watchdog.watchdog import LOOK_EVERY_S, Patience, System, Watchdog
from terrazzo.telemetry.watchdog.watched_rank import END, SHOW_THREADS, TASK, task_of

__all__ = ["Warden"]

_TOGETHER_S = 0.02
"""Ranks that all end within this many seconds were ended by somebody."""
_TOGETHER_ELSEWHERE_S = 1.0
"""Seconds for the wardens of other machines to hear of a stall before ranks are ended here."""
_GRACE_S = 2.0
"""Seconds for a rank to end when it is told to, before it is killed."""


class _ObservedRank:
    """One rank, as its warden sees it.

    Args:
        description: what the rank has written of itself, see `watched_rank`.

    Raises:
        OSError: the rank is gone, or has closed what it describes.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.rank, self.pid, self._birth = int(description["rank"]), int(description["pid"]), description["birth"]
        self._signalled = bool(description["signalled"])
        opened = [self._open(description[name], mode) for name, mode in _MODES.items()]
        self._commands = opened.pop()
        self.recording = Recording((opened[0], opened[1]))
        self._watch = -1
        with contextlib.suppress(OSError, AttributeError):  # not everywhere
            self._watch = os.pidfd_open(self.pid)

    def _open(self, place: Sequence[int], mode: int) -> int:
        number, device, inode = place
        path = f"/proc/{self.pid}/fd/{number}"
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (device, inode):  # it has closed that, and reused the number
            raise FileNotFoundError(path)
        return os.open(path, mode | os.O_CLOEXEC)

    @property
    def watch(self) -> int:
        """A descriptor that becomes readable when the rank has ended; negative if the system has none."""
        return self._watch

    @property
    def is_gone(self) -> bool:
        if self._watch >= 0:
            waiting = select.poll()  # which takes descriptors above 1023
            waiting.register(self._watch, select.POLLIN)
            return bool(waiting.poll(0))
        return state_of(self.pid) in GONE or birth_of(self.pid) != self._birth

    def ask(self) -> bool:
        """Ask for the stacks of its threads; False if it cannot answer."""
        if self.is_gone or is_stopped(self.pid):
            return False
        if self._signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, ASK)
        else:
            self._command(SHOW_THREADS)
        return True

    def facts(self) -> dict[str, Any]:
        """What the system says about its process, for other machines."""
        return {
            "state": "" if self.is_gone else state_of(self.pid),
            "traced": is_traced(self.pid),
            "drive": waits_for_drive(self.pid),
            "used": processor_s(self.pid),
        }

    def end(self, why: str) -> None:
        """Have it end itself, with exit code `STALLED`."""
        self._command(END + why.encode())

    def kill(self) -> None:
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _command(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._commands, what)


_MODES = {"ring": os.O_RDONLY, "threads": os.O_RDONLY, "commands": os.O_WRONLY | os.O_NONBLOCK}


class Warden:
    """Watches the ranks of this machine until they have ended, or stand still and are ended.

    Args:
        ranks: what the ranks have written of themselves.
        links: to the wardens of other machines; None if all ranks are on this one.

    Raises:
        OSError: a rank is gone already, or does not want to be watched any more.
    """

    def __init__(
        self, ranks: Sequence[Mapping[str, Any]], patience: Patience, links: WardenLinks | None = None
    ) -> None:
        self._ranks = [_ObservedRank(description) for description in ranks]
        here = {rank.rank: (rank.recording.tail, rank.pid) for rank in self._ranks}
        self._others = None if links is None else OtherMachines(links, patience)
        system = System() if self._others is None else self._others.system
        elsewhere = {} if self._others is None else self._others.ranks()
        self._watchdog = Watchdog(here | elsewhere, patience, system, say=say_on_stderr)
        self._memory_kills, self._has_said_who_died = MemoryKills(), False

    def run(self) -> None:
        """Watch until all ranks have ended."""
        stall = None
        while stall is None and not self._all_ended():
            self._sleep()
            self._say_who_died()
            stall = self._look()
        if self._others is not None:
            self._others.leave(self._report(), stall)
        if stall is not None:
            self._end(stall)
        for rank in self._ranks:
            if not self._watchdog.progress_of[rank.rank].has_left:  # a rank that has left in order saves its own flight
                rank.recording.save()

    def _look(self) -> Stall | None:
        """The stall of the run, if there is one: found here, or by the warden of another machine."""
        if self._others is None:
            return self._watchdog.look()
        progress_of = self._watchdog.progress_of
        self._others.send(self._report())
        if (stall := self._others.take_reports(progress_of)) is not None:
            return stall
        here = {rank.rank: progress_of[rank.rank] for rank in self._ranks}
        if self._others.any_silent(say_on_stderr):
            return self._others.cut_off(here)
        return self._watchdog.look()

    def _report(self) -> dict[str, Any]:
        """What other machines need to know about the ranks here."""
        now, ranks = time.monotonic_ns(), {}
        for rank in self._ranks:
            progress = self._watchdog.progress_of[rank.rank]
            ranks[rank.rank] = rank.facts() | {"newest": progress.newest, "left": progress.has_left}
            ranks[rank.rank]["table"] = {name: progress.table.get(name, "?") for name in ("host", "pid")}
            if now - progress.newest > LOOK_EVERY_S * 4e9:
                ranks[rank.rank]["progress"] = progress.to_json()
        return {"ranks": ranks}

    def _all_ended(self) -> bool:
        self._watchdog.read()
        return all(rank.is_gone or self._watchdog.progress_of[rank.rank].has_left for rank in self._ranks)

    def _sleep(self) -> None:
        """Wait for the next look, or until a rank has ended."""
        waiting = select.poll()
        for rank in self._ranks:
            if rank.watch >= 0 and not rank.is_gone:
                waiting.register(rank.watch, select.POLLIN)
        waiting.poll(LOOK_EVERY_S * 1e3)

    def _say_who_died(self) -> None:
        """Name the first rank that has died silently, while others still show what they wait for.

        If one has left in order, or all end at once, somebody has ended the run and knows why: nothing is said.
        """
        if self._has_said_who_died or not any(rank.is_gone for rank in self._ranks):
            return
        self._has_said_who_died = True
        time.sleep(_TOGETHER_S)
        self._watchdog.read()
        if self._all_ended() or any(progress.has_left for progress in self._watchdog.progress_of.values()):
            return
        stall = self._watchdog.why()
        evidence = keep_evidence(self._suspects, stall, FAILED)
        killed = (
            "The kernel's out-of-memory killer has ended a process here meanwhile." if self._memory_kills.count else ""
        )
        say_on_stderr(" ".join(filter(None, [stall.text, killed, evidence])))

    @property
    def _suspects(self) -> list[Suspect]:
        return [Suspect(rank.rank, rank.pid, rank.recording, rank.ask) for rank in self._ranks]

    def _end(self, stall: Stall) -> None:
        """Keep the evidence, then end the ranks."""
        evidence = keep_evidence(self._suspects, stall)
        for rank in self._ranks:
            rank.recording.save()
        say_on_stderr(f"{stall.text}\nAll ranks are ended, with exit code {STALLED}. {evidence}".rstrip())
        if self._others is not None:  # they end theirs, too: the first to end makes others fail
            time.sleep(_TOGETHER_ELSEWHERE_S)
        for rank in self._ranks:
            if not is_stopped(rank.pid):
                rank.end(stall.text)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not all(rank.is_gone or is_stopped(rank.pid) for rank in self._ranks):
            time.sleep(0.05)
        for rank in self._ranks:
            rank.kill()


def _raise_open_files() -> None:
    """Let this process have as many open files as it may: two for each other machine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the warden ends with its ranks
    task = task_of(int(os.environ.pop(TASK)))
    _raise_open_files()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the run is over already
        links = None
        if "places" in task:
            listener = socket.socket(fileno=task["listener"])
            places = [RunMachine(*each) for each in task["places"]]
            links = WardenLinks(places, task["own"], task["key"], listener, task.get("reached", ()))
        Warden(task["ranks"], Patience(*task["patience"]), links).run()


if __name__ == "__main__":
    _main()
