"""Keeps a run stopped that was asked to stop and has saved, although torchrun would start its ranks again.

To torchrun every exit code but 0 is a failure, and `--max-restarts` has it start the ranks once more. Ranks that end
with `PREEMPTED` therefore leave a note in the folder that torchrun's agent keeps for all its attempts: ranks of a later
attempt end at once with the same code, until the agent gives up. A new torchrun has a new folder, and so goes on.

An agent also starts its ranks again when machines come: it asks them to stop, and the new ones have the number of the
old attempt. These are meant to go on, and take the note away. So are those of a machine that nobody has asked, where
another one was, and is taken away: they have stopped with its ranks, and leave no note.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from terrazzo.exchange import gather_json
from terrazzo.files import replace_file
from terrazzo.telemetry.log.torchrun_report import torchrun_file

__all__ = ["STAYS_STOPPED", "leave_note", "stays_stopped"]

STAYS_STOPPED = (
    "This run was asked to stop, and has saved: the ranks that torchrun starts again do not go on. To continue it,"
    " start it anew by the command that it has printed."
)


def leave_note() -> None:
    """Note that this rank was asked to stop, and has saved."""
    if (attempt := _attempt()) is not None:
        note, number = attempt
        with contextlib.suppress(OSError):  # such as a full disk: then torchrun has its way
            replace_file(note, str(number), sync=False)


def stays_stopped() -> bool:
    """Whether an earlier attempt of this run was asked to stop. Every rank calls this once it has joined. Collective.

    Agents of several machines may count differently: all ranks go on, or none does.
    """
    attempt = _attempt()
    if any(gather_json(attempt is not None and _is_of_an_earlier_attempt(*attempt))):
        return True
    if attempt is not None:
        attempt[0].unlink(missing_ok=True)
    return False


def _attempt() -> tuple[Path, int] | None:
    """The path of the note, and the number of this attempt; None if torchrun has not started this process."""
    file = torchrun_file()
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if file is None or number is None:
        return None
    return file.parents[2] / "terrazzo.preempted", int(number)


def _is_of_an_earlier_attempt(note: Path, number: int) -> bool:
    try:
        return int(note.read_text()) < number
    except (OSError, ValueError):
        return False
