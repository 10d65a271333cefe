"""Why a run may stand still: the table of causes, with all their words, and whether each ends the run.

`stall` finds the cause, and fills in ranks, exchanges and hosts. A stall is one of the ways in which a run ends; the
others, such as a failure or a stop, are in `launch.launcher.run_end`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from terrazzo.engine.labels.purposes import RUN_THE_SAME

__all__ = ["SLOWED_BY_SIGNALS", "STALL_CAUSES", "StallCause", "StallCauseRow"]

StallCause = Literal[
    "died", "stopped", "slow", "input", "outside", "drive", "stuck", "desynchronised", "lost", "partition"
]


class StallCauseRow(NamedTuple):
    """One cause. `docs/guides/slow-runs.md` has the same table.

    Attributes:
        says: what is said of the ranks; verbs that differ for several ranks are in braces.
        because: how it is recognised.
        ends: whether waiting longer is useless, so that the run is ended.
        does: what is done about it, in words.
        message: the message of a stall; what `stall` fills in is in braces.
    """

    says: str
    because: str
    ends: bool
    does: str
    message: str = "{who} {says}.{missing}{waited}"

    def of(self, count: int) -> str:
        """`says` with its verbs, for `count` ranks."""
        return self.says.format(**{name: many if count > 1 else one for name, (one, many) in _VERBS.items()})

    def text(self, count: int = 1, **facts: object) -> str:
        """`message` with its facts filled in, for a stall of `count` ranks."""
        return self.message.format(says=self.of(count), **facts)


_VERBS = {"has": ("has", "have"), "is_": ("is", "are"), "waits": ("waits", "wait"), "does": ("does", "do")}
"""Verbs that `says` has in braces: for one rank, for several."""

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
        "Ranks {rank} and {other} have come apart: {who} waits in {exchange}, and {others} in {theirs}. {waited}."
        f" {RUN_THE_SAME}",
    ),
    "partition": StallCauseRow(
        "of a host {is_} cut off",
        "that host's process has said nothing for so long, and ranks here wait for its ranks: a lost machine, or a cut"
        " network",
        True,
        "ends the ranks here; if it is the network, the other side says the same",
        "Host {host}, of {who}, is cut off from this one: it has not been heard for {silent_s:.0f} s. Missing from"
        " {exchange}. {waited}. Either that machine is lost, or the network between; if it is the network, that host"
        " says the same of this one.",
    ),
    "lost": StallCauseRow(
        "{is_} in an exchange that does not end, with all others",
        "as it says: such as a network that was cut, which cannot be told on one machine",
        True,
        "ends the run",
        "All ranks are in {exchange}, which does not end. {waited}. See the network between them.",
    ),
}
"""The causes, in the order of the guide. `find_stall` says which one counts if several apply."""

SLOWED_BY_SIGNALS = (
    "{who} is slow: a signal stops it again and again (SIGSTOP), for {share:.0%} of the time. It is not ended for it."
    " {others} as slowly. See who stops processes there."
)
"""The message of a rank that runs, and is `slow` because signals stop it over and over."""
