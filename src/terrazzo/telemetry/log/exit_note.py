"""How a run ended, as `exit.json` in its folder: for those who do not get the run's own exit code.

torchrun turns every code into 1, and a queue may report none. The note is of the newest end; while a run is running
there is none. Two kinds of processes write it:

    leave_exit      a rank as it ends: the first failure counts, so a note that is there stays
    overrule_exit   a launcher or a warden, which knows more about the ranks than they do
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from terrazzo.exit_codes import meaning_of, reason_of
from terrazzo.files import replace_file, replacing
from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["ExitNote", "exit_of", "forget_exit", "leave_exit", "note_of_code", "overrule_exit"]


class ExitNote(NamedTuple):
    """How a run ended.

    Attributes:
        code: the run's own exit code.
        reason: a key for programs: that of the code in `EXIT_CODES`, or of a stall in `STALL_CAUSES`, or `killed` if
            a signal ended the run or the rank that failed first.
        cause: the reason in words.
        rank: the rank at fault; None if it was none, or several.
        step: steps that this rank had finished; None before the first, or if that is not known.
    """

    code: int
    reason: str
    cause: str
    rank: int | None = None
    step: int | None = None


def note_of_code(code: int, step: int | None) -> ExitNote:
    """The note of a run that ended as its exit code says, such as after all steps, in the words of the code's row."""
    return ExitNote(code, reason_of(code), meaning_of(code), None, step)


def leave_exit(folder: Path, note: ExitNote) -> None:
    """Write the note of a rank that ends, unless there is one. Raises nothing: the rank is already failing."""
    path = RunFolder(folder).exit_note
    with contextlib.suppress(OSError), replacing(path, sync=False) as beside:
        beside.write_text(_text(note), encoding="utf-8")
        try:
            os.link(beside, path)  # of several ranks that fail at once, one succeeds
        except OSError:
            if not path.exists():  # a file system without links: `beside` takes its place
                return
        beside.unlink()


def overrule_exit(folder: Path, note: ExitNote) -> None:
    """Write the note of a launcher or warden, unless there is one of the same code and rank, which says more."""
    earlier = exit_of(folder)
    if earlier is None or (earlier.code, earlier.rank) != (note.code, note.rank):
        _write(folder, note)


def _write(folder: Path, note: ExitNote) -> None:
    """Replace the note as a whole."""
    with contextlib.suppress(OSError):
        replace_file(RunFolder(folder).exit_note, _text(note), sync=False)


def _text(note: ExitNote) -> str:
    return json.dumps(note._asdict()) + "\n"  # ASCII: a path in it may be no UTF-8


def exit_of(folder: Path) -> ExitNote | None:
    """The note of a run; None if there is none, or it cannot be read."""
    run = RunFolder(folder)
    try:
        return ExitNote(**(run.read(run.exit_note) or {}))
    except TypeError:
        return None


def forget_exit(folder: Path) -> None:
    """Remove the note: a run is starting in this folder."""
    RunFolder(folder).exit_note.unlink(missing_ok=True)
