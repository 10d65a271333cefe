"""Why a run may stand still: the one table of causes, by which a stall is worded, judged and documented."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CAUSES", "Cause", "CauseRow"]

Cause = Literal["died", "stopped", "slow", "input", "outside", "drive", "stuck", "desynchronised", "lost", "partition"]


class CauseRow(NamedTuple):
    """One cause, as docs/guides/slow-runs.md has it in its table.

    Attributes:
        says: of a rank, in the words of a message.
        because: what it is known by.
        ends: whether nothing will come of waiting longer, so that the run is ended.
        does: what is done, in words.
        verbs: `says`, with a place for each verb that is another for several ranks.
    """

    says: str
    because: str
    ends: bool
    does: str
    verbs: str = ""


_NAMES = "names it, and lets it go on"

CAUSES: dict[Cause, CauseRow] = {
    "stopped": CauseRow(
        "is stopped",
        "its state is `T`: SIGSTOP, Ctrl-Z, a debugger",
        True,
        "ends the run; also during a checkpoint",
        "{is_} stopped (SIGSTOP)",
    ),
    "died": CauseRow("has ended", "its process is gone", True, "ends the run", "{has} ended"),
    "slow": CauseRow(
        "is still at work",
        "it waits for no other rank, and has had 5 % of a processor or more; or it goes on, and signals have stopped it"
        " again and again for a quarter of the time",
        False,
        _NAMES,
        "{is_} still at work, and {is_} not ended for it",
    ),
    "input": CauseRow("waits for data", "it waits for its next batch", False, _NAMES, "{waits} for data"),
    "drive": CauseRow(
        "waits for a drive or a file system",
        "a thread of it was in state `D`",
        False,
        _NAMES,
        "{waits} for a drive or a file system",
    ),
    "outside": CauseRow(
        "is between steps, in code of your own",
        "in a loop of your own: such as a checkpoint, an evaluation or a download",
        False,
        "names it if others wait for it, and lets it go on",
        "{is_} between steps, in code of your own, and {is_} not ended for it",
    ),
    "stuck": CauseRow(
        "does nothing",
        "none of these: a lock, a deadlock, a lost thread; code of yours that sleeps or waits for a network, in a step,"
        " longer than that",
        True,
        "ends the run",
        "{does} nothing, and {waits} for no other rank",
    ),
    "desynchronised": CauseRow(
        "has come apart from another",
        "both wait, in different exchanges, or in the same one for other units or of other sizes",
        True,
        "ends the run, and names both exchanges",
    ),
    "partition": CauseRow(
        "of a host is cut off",
        "that host's process has said nothing for so long, and ranks here wait for its ranks: a lost machine, or a cut"
        " network",
        True,
        "ends the ranks here; if it is the network, the other side says the same",
    ),
    "lost": CauseRow(
        "is in an exchange that does not end, with all others",
        "as it says: such as a network that was cut, which cannot be told on one machine",
        True,
        "ends the run",
    ),
}
