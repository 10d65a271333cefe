"""How a run has ended, as `exit.json` in its folder: for those who get another exit code than the run's own.

torchrun makes 1 of every code, and a queue may tell none. The note is of the newest end; while a run goes on there is
none.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from terrazzo.exit_codes import EXIT_CODES
from terrazzo.files import replace_file
from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["ExitNote", "exit_of", "forget_exit", "leave_exit", "note_of_code"]


class ExitNote(NamedTuple):
    """How a run has ended.

    Attributes:
        code: the exit code, of the run itself.
        reason: a key for programs: of the code, as in `EXIT_CODES`; of a rank that stood still or died, as in
            `STALL_CAUSES`; `killed` where a signal has ended the run, or the rank that failed first.
        cause: in words.
        rank: the one that it lay with; None where it lay with none, or with several.
        step: finished steps of that rank then; None where there was none yet, or nobody knows.
    """

    code: int
    reason: str
    cause: str
    rank: int | None = None
    step: int | None = None


def note_of_code(code: int, step: int | None) -> ExitNote:
    """The note of a run that has done all its steps, or was asked to stop, in the words of the code's row."""
    row = EXIT_CODES[code]
    return ExitNote(code, row.reason, row.meaning, None, step)


def leave_exit(folder: Path, note: ExitNote, *, replace: bool = False) -> None:
    """Write the note, all at once. What has failed first counts: a note that is there already stays.

    With `replace`, for whoever looks after ranks, a note stays only if it has the same code and rank: that rank has
    said more. Nothing is raised: whoever calls this is about to end, and has said why.
    """
    target = RunFolder(folder).exit_note
    with contextlib.suppress(OSError):
        earlier = exit_of(folder)
        same = earlier is not None and (earlier.code, earlier.rank) == (note.code, note.rank)
        if not target.exists() or (replace and not same):
            replace_file(target, json.dumps(note._asdict()) + "\n", sync=False)  # a path in it may be no UTF-8


def exit_of(folder: Path) -> ExitNote | None:
    """The note that is there; None where there is none that can be read."""
    run = RunFolder(folder)
    try:
        return ExitNote(**(run.read(run.exit_note) or {}))
    except TypeError:
        return None


def forget_exit(folder: Path) -> None:
    """Remove the note: a run has begun in the folder, or goes on."""
    RunFolder(folder).exit_note.unlink(missing_ok=True)
