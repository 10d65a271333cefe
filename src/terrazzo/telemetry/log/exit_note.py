"""How a run has ended, as `exit.json` in its folder: for those who hear another exit code than its own.

torchrun makes 1 of every code, and a queue may tell none. The note is of the newest end; while a run goes on there is
none.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from terrazzo.exit_codes import PREEMPTED
from terrazzo.files import replace_file
from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["ExitNote", "exit_of", "forget_exit", "leave_exit", "went_well"]


class ExitNote(NamedTuple):
    """How a run has ended.

    Attributes:
        code: the exit code, of the run itself.
        cause: in words.
        rank: that it lay with; None where it lay with none, or with several.
        step: finished steps of that rank then; None where there was none yet, or nobody knows.
    """

    code: int
    cause: str
    rank: int | None = None
    step: int | None = None


def went_well(code: int, step: int | None) -> ExitNote:
    """Of a run that has done all its steps, or was asked to stop."""
    cause = "asked to stop, and saved" if code == PREEMPTED else "all steps are done"
    return ExitNote(code, cause, None, step)


def leave_exit(folder: Path, note: ExitNote, *, replace: bool = False) -> None:
    """Write it, all at once. What has failed first is what counts: one that is there stays.

    With `replace`, from whoever looks after ranks, only one of the same code and rank does: that rank has said more.
    Nothing is raised: whoever calls this is about to end, and has said why.
    """
    target = RunFolder(folder).exit_note
    with contextlib.suppress(OSError):
        there = exit_of(folder)
        same = there is not None and (there.code, there.rank) == (note.code, note.rank)
        if not target.exists() or (replace and not same):
            replace_file(target, json.dumps(note._asdict(), ensure_ascii=False) + "\n", sync=False)


def exit_of(folder: Path) -> ExitNote | None:
    """The note that is there; None where there is none that can be read."""
    there = RunFolder(folder)
    try:
        return ExitNote(**(there.read(there.exit_note) or {}))
    except TypeError:
        return None


def forget_exit(folder: Path) -> None:
    """A run has begun there, or goes on."""
    RunFolder(folder).exit_note.unlink(missing_ok=True)
