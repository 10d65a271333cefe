"""`terrazzo watch RUN`: follows a running run, on a screen or line by line into a pipe."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.shared.arguments import RunArgument
from terrazzo.telemetry.log.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["watch"]

_WAIT_S = 0.5
_FAILED_S = 20.0
"""Seconds after its note of a failure, or without any rank, for which a run may still be started again."""

_KILLED = "ended without a note of how: all its processes on this machine are gone, killed with whoever started them"


def watch(
    run: RunArgument, once: Annotated[bool, typer.Option("--once", help="show what there is now, and end")] = False
) -> None:
    """Follow a run while it goes on: its last log steps, where the time of a step goes, which rank others wait for, and
    where each rank of this machine is now: step, phase, unit, what it waits for.

    It ends when the run does, or some seconds after its processes, all of them of this machine, were killed; Ctrl-C
    ends it before, and does nothing to the run. Into a pipe or a file it writes what it follows, and a line for each
    log step.
    """
    from rich.console import Console

    console, watched = Console(highlight=False), _WatchedRun(run)
    try:
        if once:
            lines = watched.lines()
            console.print(watched.screen(lines, watched.verdict(lines), console.width), soft_wrap=True)
        elif console.is_terminal:
            _on_screen(watched, console)
        else:
            _as_lines(watched, console.width)
    except KeyboardInterrupt:
        pass


Lines = Sequence[Mapping[str, Any]]


class _WatchedRun:
    """The files of a run that another process writes."""

    def __init__(self, folder: Path) -> None:
        from terrazzo.telemetry import LiveRanks
        from terrazzo.telemetry.log.records import GrowingLines

        self._files = RunFolder.of(folder)
        self._ranks, self._growing = LiveRanks(self._files.path), GrowingLines(self._files.metrics)

    def lines(self, waits: bool = False) -> Lines:
        """The lines of `metrics.jsonl`; with `waits`, none while a run may still begin in the folder."""
        from terrazzo.telemetry import run_lines

        folder, metrics = self._files.path, self._files.metrics
        with suppress(OSError):
            if lines := self._growing.read():
                return lines
        if waits and folder.is_dir() and (not metrics.exists() or metrics.is_file()):
            return []
        return run_lines(folder)  # which says why there is none

    @property
    def title(self) -> str:
        """What is followed, and what will come."""
        steps = self.steps()
        return f"following {self._files.path}{'' if steps is None else f', {steps} steps'}: a line for each log step"

    def stamp(self) -> tuple[int, int] | None:
        """A value that changes when the file has new lines."""
        try:
            status = self._files.metrics.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def steps(self) -> int | None:
        """The steps of the whole run, as its configuration says; None if it has none."""
        try:
            return int((self._files.settings() or {})["train"]["steps"])
        except (ValueError, KeyError, TypeError):
            return None

    def verdict(self, lines: Lines) -> str | None:
        """What bounds the run's step, as a sentence; None before the first record."""
        from terrazzo.train.report.run_review import RunReview

        bound = RunReview(self._files.path, lines).verdict() if lines else None
        return None if bound is None else str(bound)

    def failed(self, lines: Lines) -> str | None:
        """How the run failed, in a line; None while it is running, or may be started again."""
        from terrazzo.telemetry import has_ended
        from terrazzo.telemetry.log.exit_note import exit_of

        try:
            age_s = time.time() - self._files.exit_note.stat().st_mtime
        except OSError:
            return _KILLED if not has_ended(lines) and self._ranks.gone_s() > _FAILED_S else None
        if has_ended(lines) or age_s < _FAILED_S or (note := exit_of(self._files.path)) is None:
            return None
        return f"ended with exit code {note.code}: {note.cause}"

    def screen(self, lines: Lines, verdict: str | None, width: int) -> Any:
        """The screen as rich's text."""
        from rich.text import Text

        from terrazzo.messages import printable
        from terrazzo.telemetry import has_ended, screen_of

        ranks = [] if has_ended(lines) else self._ranks.lines()
        if not lines:
            return Text(printable("\n".join(["waiting for the first log step", *ranks])))
        name, age_s = str(self._files.path), max(0.0, time.time() - self._files.metrics.stat().st_mtime)
        text = screen_of(name, lines, steps=self.steps(), verdict=verdict, age_s=age_s, width=width, ranks=ranks)
        return Text(printable(text))


def _on_screen(run: _WatchedRun, console: Console) -> None:
    from rich.live import Live

    from terrazzo.telemetry import has_ended

    stamp, verdict = None, None
    lines: Lines = []
    with Live(console=console, auto_refresh=False) as live:
        while not (has_ended(lines) or run.failed(lines)):
            if (newest := run.stamp()) != stamp or not lines:
                stamp, lines = newest, run.lines(waits=True)
                verdict = run.verdict(lines)
            live.update(run.screen(lines, verdict, console.width), refresh=True)
            time.sleep(0 if has_ended(lines) else _WAIT_S)
    if failed := run.failed(lines):
        console.print(failed, soft_wrap=True)


def _as_lines(run: _WatchedRun, width: int) -> None:
    from terrazzo.cli.shared.terminal import say
    from terrazzo.telemetry import has_ended, rows_of

    lines: Lines = []
    told: Lines = []
    has_header = False
    failed: str | None = None
    run.lines(waits=True)  # refuses what is no run
    say(run.title)
    while not (has_ended(lines) or failed):
        lines = run.lines(waits=True)
        failed = run.failed(lines)
        if lines is not told:
            same = sum(1 for _ in takewhile(_alike, zip(told, lines, strict=False)))  # a run may go back, and its file
            if rows := rows_of(lines, run.steps(), width, first=same) if lines else []:
                for row in rows[has_header:]:
                    say(row)
                has_header, told = True, lines
        time.sleep(0 if has_ended(lines) or failed else _WAIT_S)
    if failed:
        say(failed)


def _alike(lines: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    one, other = lines
    return one is other or str(one) == str(other)  # also where a value is not a number
