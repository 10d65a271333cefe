"""`terrazzo watch RUN`: a run while it goes on, on a screen, or line by line into a pipe."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrazzo.cli.shared.arguments import RunArgument

if TYPE_CHECKING:
    from terrazzo.telemetry import LiveRanks

__all__ = ["watch"]

_WAIT_S = 0.5
_FAILED_S = 20.0
"""So long after a run has noted that it failed, nobody starts it again any more."""


def watch(
    run: RunArgument, once: Annotated[bool, typer.Option("--once", help="show what there is now, and end")] = False
) -> None:
    """Follow a run while it goes on: its last log steps, where the time of a step goes, which rank others wait for, and
    where each rank of this machine is now: step, phase, unit, what it waits for.

    It ends when the run does; Ctrl-C ends it before, and does nothing to the run. Into a pipe or a file it writes a
    line for each log step.
    """
    from rich.console import Console

    from terrazzo.telemetry import LiveRanks

    console = Console(highlight=False)
    try:
        if once:
            console.print(_screen(run, _read(run), console.width, LiveRanks(run)), soft_wrap=True)
        elif console.is_terminal:
            _on_screen(run)
        else:
            _as_lines(run, console.width)
    except KeyboardInterrupt:
        pass


def _on_screen(run: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from terrazzo.telemetry import LiveRanks, has_ended

    console, stamp, ranks = Console(highlight=False), None, LiveRanks(run)
    lines: Sequence[Mapping[str, Any]] = []
    with Live(console=console, auto_refresh=False) as live:
        while not (has_ended(lines) or _failed(run, lines)):
            if (newest := _stamp(run)) != stamp or not lines:
                stamp, lines = newest, _read(run, waits=True)
                verdict = _verdict(run, lines)
            shown = _screen(run, lines, console.width, ranks, verdict) if lines else _waiting(ranks)
            live.update(shown, refresh=True)
            time.sleep(0 if has_ended(lines) else _WAIT_S)
    if failed := _failed(run, lines):
        console.print(failed, soft_wrap=True)


def _as_lines(run: Path, width: int) -> None:
    from terrazzo.cli.shared.terminal import say
    from terrazzo.telemetry import has_ended, rows_of

    lines: Sequence[Mapping[str, Any]] = []
    told = 0
    failed: str | None = None
    while not (has_ended(lines) or failed):
        lines = _read(run, waits=True)
        failed = _failed(run, lines)
        rows = rows_of(lines, _steps(run), width) if lines else []
        for row in rows[told:]:
            say(row)
        told = max(told, len(rows))
        time.sleep(0 if has_ended(lines) or failed else _WAIT_S)
    if failed:
        say(failed)


def _failed(run: Path, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """How a run has ended that wrote no summary, in a line; None where it goes on, or is about to be started again."""
    from terrazzo.telemetry import has_ended
    from terrazzo.telemetry.log.exit_note import exit_of
    from terrazzo.telemetry.log.run_folder import RunFolder

    try:
        age_s = time.time() - RunFolder(run).exit_note.stat().st_mtime
    except OSError:
        return None
    if has_ended(lines) or age_s < _FAILED_S or (note := exit_of(run)) is None:
        return None
    return f"ended with exit code {note.code}: {note.cause}"


def _read(run: Path, waits: bool = False) -> Sequence[Mapping[str, Any]]:
    """The run's lines; none yet, if that `waits`, where there is a folder that a run may be about to write into."""
    from terrazzo.errors import BadInput
    from terrazzo.telemetry import run_lines

    try:
        return run_lines(run)
    except BadInput:
        if waits and run.is_dir() and (not _metrics(run).exists() or _metrics(run).is_file()):
            return []
        raise


def _waiting(ranks: LiveRanks) -> str:
    return "\n".join(["waiting for the first log step", *ranks.lines()])


def _screen(
    run: Path, lines: Sequence[Mapping[str, Any]], width: int, ranks: LiveRanks, verdict: str | None = None
) -> Any:
    from rich.text import Text

    from terrazzo.errors import printable
    from terrazzo.telemetry import has_ended, screen_of

    age_s = max(0.0, time.time() - _metrics(run).stat().st_mtime)
    sentence = verdict or _verdict(run, lines)
    now = [] if has_ended(lines) else ranks.lines()
    text = screen_of(str(run), lines, steps=_steps(run), verdict=sentence, age_s=age_s, width=width, ranks=now)
    return Text(printable(text))


def _verdict(run: Path, lines: Sequence[Mapping[str, Any]]) -> str | None:
    from terrazzo.train.planning.run_review import RunReview

    bound = RunReview(run, lines).verdict() if lines else None
    return None if bound is None else str(bound)


def _stamp(run: Path) -> tuple[int, int] | None:
    try:
        status = _metrics(run).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _steps(run: Path) -> int | None:
    """How many steps the whole run has, as its configuration says; None for a loop of one's own."""
    from terrazzo.telemetry.log.run_folder import RunFolder

    try:
        return int((RunFolder(run).settings() or {})["train"]["steps"])
    except (ValueError, KeyError, TypeError):
        return None


def _metrics(run: Path) -> Path:
    from terrazzo.telemetry.log.run_folder import RunFolder

    return RunFolder(run).metrics
