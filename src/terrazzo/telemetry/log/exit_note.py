"""How a run has ended, as `exit.json` in its folder: for those who get another exit code than the run's own.

torchrun makes 1 of every code, and a queue may tell none. The note is of the newest end; while a run goes on there is
none. Processes of two kinds write it:

    leave_exit      a rank, as it ends: what has failed first counts, so a note that is there stays
    overrule_exit   whoever looks after ranks, a launcher or a warden, which know of them what no rank does
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from terrazzo.exit_codes import EXIT_CODES
from terrazzo.files import replace_file, replacing
from terrazzo.telemetry.log.run_folder import RunFolder

__all__ = ["ExitNote", "exit_of", "forget_exit", "leave_exit", "note_of_code", "overrule_exit"]


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


def leave_exit(folder: Path, note: ExitNote) -> None:
    """Write the note of a rank that ends, unless there is one. Nothing is raised: it has said why it ends."""
    path = RunFolder(folder).exit_note
    with contextlib.suppress(OSError), replacing(path, sync=False) as beside:
        beside.write_text(_text(note), encoding="utf-8")
        try:
            os.link(beside, path)  # of ranks that fail at once, one succeeds
        except OSError:
            if not path.exists():  # a file system without links: `beside` takes its place
                return
        beside.unlink()


def overrule_exit(folder: Path, note: ExitNote) -> None:
    """Write the note of whoever looks after ranks, unless there is one of the same code and rank, which says more."""
    earlier = exit_of(folder)
    if earlier is None or (earlier.code, earlier.rank) != (note.code, note.rank):
        _write(folder, note)


def _write(folder: Path, note: ExitNote) -> None:
    """All at once."""
    with contextlib.suppress(OSError):
        replace_file(RunFolder(folder).exit_note, _text(note), sync=False)


def _text(note: ExitNote) -> str:
    return json.dumps(note._asdict()) + "\n"  # ASCII: a path in it may be no UTF-8


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
