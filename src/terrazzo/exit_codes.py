"""The table of exit codes with which processes of this package end.

`docs/reference/exit-codes.md` and `terrazzo train --help` are written from it, `exit.json` of a run takes its keys, and
each error of `terrazzo.errors` has its code.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

__all__ = [
    "BAD_INPUT",
    "BROKEN",
    "CORRUPTED",
    "DIVERGED",
    "DONE",
    "EXIT_CODES",
    "FAILED",
    "INTERRUPTED",
    "PREEMPTED",
    "STALLED",
    "UNREAD",
    "ExitRow",
    "exit_codes_text",
    "meaning_of",
    "reason_of",
    "signal_name",
]

DONE = 0
FAILED = 1
BAD_INPUT = 2
BROKEN = 70  # EX_SOFTWARE of sysexits.h
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
STALLED = 81
CORRUPTED = 82
DIVERGED = 83
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
UNREAD = 141  # 128 + SIGPIPE: what shells report of `cat` and `ls`


class ExitRow(NamedTuple):
    """One exit code.

    Attributes:
        reason: its key in `exit.json`.
        meaning: in a few words; also the cause in `exit.json` of a run that went well.
        edit: what to do, in Markdown, for the reference page.
        ends_runs: whether a run may end with it; others are of verbs that do not train.
    """

    reason: str
    meaning: str
    edit: str = ""
    ends_runs: bool = True


_GO_ON = "its last line has the command that goes on from the newest checkpoint"

EXIT_CODES: dict[int, ExitRow] = {
    DONE: ExitRow("done", "all steps are done"),
    FAILED: ExitRow("failed", "the run failed", "read the first failing rank's traceback, the last thing on screen"),
    BAD_INPUT: ExitRow(
        "bad_input", "bad input, and nothing was started", "change it: a paragraph says what was found, and the edit"
    ),
    BROKEN: ExitRow(
        "broken",
        "the command itself has failed, and its question has no answer",
        "read the traceback; any verb of `checkpoint` and `config` ends so, as 1 may be an answer there",
        ends_runs=False,
    ),
    PREEMPTED: ExitRow("preempted", "asked to stop, and saved", "start the same command again: it continues"),
    STALLED: ExitRow(
        "stalled",
        "ranks stood still, and were ended",
        "which one, why, and [what they were doing](../guides/slow-runs.md#my-run-is-stuck) is said; " + _GO_ON,
    ),
    CORRUPTED: ExitRow(
        "corrupted",
        "memory, a drive or a rank has changed what it should keep",
        "copies on ranks differ (`train.check_replicas_every`), a rank computes wrongly (`guard.replay_every`), or a"
        " swap file holds other bytes (`offload.digest`): start again from a checkpoint, without that rank's machine,"
        " or that drive, if it happens again",
    ),
    DIVERGED: ExitRow(
        "diverged",
        "the numbers diverged",
        "change what the message names: a loss or gradients are not finite, a loss scale is at its minimum, or more"
        " steps than `guard.limit` were skipped; checkpoints up to the step that it names are intact",
    ),
    INTERRUPTED: ExitRow("interrupted", "ended at once by a second Ctrl-C, with nothing saved", _GO_ON),
    UNREAD: ExitRow(
        "unread",
        "nobody reads the output any more",
        "any verb but `train`, `run` and `profile` ends so, as with `| head`",
        ends_runs=False,
    ),
}


def reason_of(code: int) -> str:
    """The key of any code of a run; of one without a row `killed`, if it stands for a signal, else `failed`."""
    if (row := _row_of_run(code)) is not None:
        return row.reason
    return "killed" if _is_of_signal(code) else EXIT_CODES[FAILED].reason


def meaning_of(code: int) -> str:
    """The meaning of any code of a run in a few words."""
    if (row := _row_of_run(code)) is not None:
        return row.meaning
    return f"ended by {signal_name(code - 128)}" if _is_of_signal(code) else f"ended with exit code {code}"


def _row_of_run(code: int) -> ExitRow | None:
    """The row of a code with which a run ends by itself: what a library or a signal ends with means something else."""
    row = EXIT_CODES.get(code)
    return row if row is not None and row.ends_runs else None


def _is_of_signal(code: int) -> bool:
    """Whether it is what shells report of a process that a signal has ended."""
    return code - 128 in signal.valid_signals()


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; real-time signals have no names but that of the first, so `SIGRTMIN+1` for 35."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def exit_codes_text() -> str:
    """The meanings of all exit codes of a run on one line, for `--help`."""
    return "; ".join(f"{code} {row.meaning}" for code, row in EXIT_CODES.items() if row.ends_runs)
