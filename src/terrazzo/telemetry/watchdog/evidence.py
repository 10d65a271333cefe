"""Writes what ranks were doing when they stood still, before any is ended: their threads' stacks and newest events."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from terrazzo.exit_codes import STALLED
from terrazzo.processes.system import text_of
from terrazzo.telemetry.flight.ring import EventKind, Flight
from terrazzo.telemetry.flight.spans import TableNames
from terrazzo.telemetry.log.exit_note import ExitNote, overrule_exit
from terrazzo.telemetry.log.run_folder import RunFolder, rank_files
from terrazzo.telemetry.watchdog.recording import Recording
from terrazzo.telemetry.watchdog.stall import Stall

__all__ = ["Suspect", "keep_evidence"]

_ANSWER_S = 3.0
"""Seconds for a rank to write the stacks of its threads. faulthandler does that whatever holds the GIL."""

_NEWEST = 60
"""How many of each rank's newest events are written, in words."""


class Suspect(NamedTuple):
    """A rank of which evidence is kept.

    Attributes:
        ask: asks the rank to write the stacks of its threads; returns False if it cannot.
    """

    rank: int
    pid: int
    recording: Recording
    ask: Callable[[], bool]


def keep_evidence(suspects: Sequence[Suspect], stall: Stall, code: int = STALLED) -> str:
    """Write a file for each rank into the run's folder; returns a sentence that says where, empty without a folder.

    Also notes how the run ends, with exit code `code`, which ranks that fail because of the stall do not replace.
    """
    table = next((table for each in suspects if "folder" in (table := each.recording.tail.table)), None)
    if table is None:
        return ""
    step = next((each.recording.step for each in suspects if each.rank == (stall.rank or 0)), None)
    overrule_exit(Path(table["folder"]), ExitNote(code, stall.cause, stall.text, stall.rank, step))
    _await([each.recording for each in suspects if each.ask()])
    target = RunFolder(Path(table["folder"])).stall
    try:
        target.mkdir(exist_ok=True)
        _clear(target, table["world"])
        (target / "stall.txt").write_text(stall.text + "\n", encoding="utf-8")
        for each in suspects:
            text = "\n".join(_evidence(each))
            (target / f"rank-{each.rank}.txt").write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        return f"What they were doing could not be written to '{target}' ({error.strerror})."
    return f"Where their threads were, and what they did last, is in {target}."


def _clear(target: Path, world: int) -> None:
    """Remove files of an earlier run's ranks that do not exist in this one."""
    for rank, old in rank_files(target):
        if rank >= world:
            old.unlink(missing_ok=True)


def _await(recordings: list[Recording]) -> None:
    """Wait until all ranks have written their stacks, and nothing is added to them."""
    deadline, before = time.monotonic() + _ANSWER_S, None
    while time.monotonic() < deadline:
        answers = [each.threads for each in recordings]
        if all(answers) and answers == before:
            return
        before = answers
        time.sleep(0.1)


def _evidence(suspect: Suspect) -> Iterator[str]:
    recording = suspect.recording
    yield f"Rank {suspect.rank}, process {suspect.pid}"
    yield "\nWhere its threads were:\n"
    yield recording.threads.strip() or _by_another(suspect.pid) or _by_system(suspect.pid)
    yield f"\nThe last {_NEWEST} of what it recorded, seconds before the newest first:\n"
    yield from _in_words(recording.tail.flight())


def _by_another(pid: int) -> str:
    """What py-spy says about a process that does not answer; empty if it is not installed, or not permitted."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = [command, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return ""


def _by_system(pid: int) -> str:
    """What Linux says about each thread."""
    lines = ["It did not answer. What the system says of them (py-spy, if it is installed, says more):"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        state = text_of(task / "stat").rpartition(")")[2].split()[:1]
        lines.append(f"  thread {task.name} ({text_of(task / 'comm')}): {' '.join(state)} {text_of(task / 'wchan')}")
    return "\n".join(lines)


def _in_words(flight: Flight) -> Iterator[str]:
    names = TableNames(flight.table)
    newest = flight.events[-1].time if flight.events else 0
    for event in flight.events[-_NEWEST:]:
        kind = EventKind(event.kind)
        if kind in (EventKind.ISSUED, EventKind.DONE, EventKind.WAITS, EventKind.WAITED):
            axis, exchanged, _ = names.track(event.track)
            words = f"{exchanged} {event.ordinal} {f'on {axis}' if axis else 'of all ranks'}"
            if kind is EventKind.ISSUED and (unit := names.moved(event)) is not None:
                words += f", {unit}, {event.value:,} bytes sent"
        elif kind in (EventKind.BEGINS, EventKind.ENDS):
            words = names.unit(event.unit) + (f" {names.name(event)}" if kind is EventKind.BEGINS else "")
        else:
            words = str(event.ordinal) if kind is EventKind.STEP else names.name(event)
        yield f"{(newest - event.time) / 1e9:12.6f}  {kind.name.lower():<7} {words}"
