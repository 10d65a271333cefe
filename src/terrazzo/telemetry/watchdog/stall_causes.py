"""Why a run may stand still: a table of causes, each in words, and whether it ends the run. `stall` finds them.

That a run has stood still is one of the ways in which it ends, beside a failure or a stop: those are in
`train.launch.outcome`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["STALL_CAUSES", "StallCause", "StallCauseRow"]

StallCause = Literal[
    "died", "stopped", "slow", "input", "outside", "drive", "stuck", "desynchronised", "lost", "partition"
]


class StallCauseRow(NamedTuple):
    """One cause, as docs/guides/slow-runs.md has it in its table.

    Attributes:
        says: of ranks, as the guide has it; a verb that differs for several ranks stands in braces. A message has these
            words behind the ranks' numbers. `stall` has sentences of its own for `desynchronised`, `lost` and
            `partition`, which tell exchanges and hosts, and for a rank that is `slow` since signals stop it.
        because: what it is known by.
        ends: whether nothing will come of waiting longer, so that the run is ended.
        does: what is done, in words.
    """

    says: str
    because: str
    ends: bool
    does: str

    def of(self, count: int) -> str:
        """`says`, of so many ranks."""
        return self.says.format(**{name: many if count > 1 else one for name, (one, many) in _VERBS.items()})


_VERBS = {"has": ("has", "have"), "is_": ("is", "are"), "waits": ("waits", "wait"), "does": ("does", "do")}
"""In braces, of one rank, of several."""

_NAMES = "names it, and lets it go on"

STALL_CAUSES: dict[StallCause, StallCauseRow] = {
    "stopped": StallCauseRow(
        "{is_} stopped (SIGSTOP)",
        "its state is `T`: SIGSTOP, Ctrl-Z, a debugger",
        True,
        "ends the run; also during a checkpoint",
    ),
    "died": StallCauseRow("{has} ended", "its process is gone", True, "ends the run"),
    "slow": StallCauseRow(
        "{is_} still at work, and {is_} not ended for it",
        "it waits for no other rank, and has had 5 % of a processor or more; or it goes on, and signals have stopped it"
        " again and again for a quarter of the time",
        False,
        _NAMES,
    ),
    "input": StallCauseRow("{waits} for data", "it waits for its next batch", False, _NAMES),
    "drive": StallCauseRow("{waits} for a drive or a file system", "a thread of it was in state `D`", False, _NAMES),
    "outside": StallCauseRow(
        "{is_} between steps, in code of your own, and {is_} not ended for it",
        "in a loop of your own: such as a checkpoint, an evaluation or a download",
        False,
        "names it if others wait for it, and lets it go on",
    ),
    "stuck": StallCauseRow(
        "{does} nothing, and {waits} for no other rank",
        "none of these: a lock, a deadlock, a lost thread; code of yours that sleeps or waits for a network, in a step,"
        " longer than that",
        True,
        "ends the run",
    ),
    "desynchronised": StallCauseRow(
        "{has} come apart from another",
        "both wait, in different exchanges, or in the same one for other units or of other sizes",
        True,
        "ends the run, and names both exchanges",
    ),
    "partition": StallCauseRow(
        "of a host {is_} cut off",
        "that host's process has said nothing for so long, and ranks here wait for its ranks: a lost machine, or a cut"
        " network",
        True,
        "ends the ranks here; if it is the network, the other side says the same",
    ),
    "lost": StallCauseRow(
        "{is_} in an exchange that does not end, with all others",
        "as it says: such as a network that was cut, which cannot be told on one machine",
        True,
        "ends the run",
    ),
}
