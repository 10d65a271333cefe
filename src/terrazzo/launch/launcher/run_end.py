"""How ranks that were started together have ended: in which of six ways, what is said about it, and the exit code.

`ENDINGS` lists the ways, in the order in which they are tried. What failed first is printed last, where one finds it at
the end of a long output. One of the ways is that ranks stood still: why is found while they still run, by
`telemetry.watchdog`, which has the causes in `STALL_CAUSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.config import without_passwords
from terrazzo.exit_codes import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    STALLED,
    meaning_of,
    reason_of,
    signal_name,
)
from terrazzo.launch.launcher.local_ranks import LocalRank
from terrazzo.launch.launcher_pipe import Failure, Milestone, first_failure
from terrazzo.launch.stopping.notices import Notices, say_now
from terrazzo.messages import listed
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.telemetry.log.exit_note import ExitNote
from terrazzo.telemetry.watchdog.stall import Stall

__all__ = ["RanksAtEnd", "RunEnd", "report_end"]

_SEEN_LATE_NS = 200_000_000
"""How late a death may be seen. Other ranks' errors, about connections to the dead rank, may come earlier."""
_KILL_SEEN_LATE_NS = 2_000_000_000
"""The same for SIGKILL, with more margin for a busy machine: no rank dies of that because another has failed."""
_OTHERS_STOPPED = "; the other ranks were stopped."


class RunEnd(NamedTuple):
    """How ranks that were started together have ended.

    Attributes:
        code: the exit code.
        why: what failed first, or the signal that ended all, in a line; empty if it is what the exit code says.
        lasts: whether it would end in the same way if it was started again.
        rank: the rank that failed first.
        failed_at_start: whether that rank had not finished a step since its start.
        step: the newest step that it had finished, if that is known.
        reason: as in an `ExitNote`; empty for that of the code.
    """

    code: int
    why: str = ""
    lasts: bool = True
    rank: int | None = None
    failed_at_start: bool = False
    step: int | None = None
    reason: str = ""

    @property
    def note(self) -> ExitNote:
        """The launcher's note of the end."""
        cause = str(without_passwords(self.why or meaning_of(self.code)))
        return ExitNote(self.code, self.reason or reason_of(self.code), cause, self.rank, self.step)


@dataclass(frozen=True)
class RanksAtEnd:
    """What is known about ranks once all have ended.

    Attributes:
        stop_signal: the signal that asked all ranks to stop; to die of it is no failure.
        kill_signal: the signal that had all of them ended at once.
        stall: why they stood still, if they did.
        evidence: a sentence that says where the evidence of the stall is.
        oom_kills: how many processes the kernel has killed meanwhile for lack of memory, if that is known.
        notices: what to say about a run that was ended at once.
    """

    ranks: Sequence[LocalRank]
    stop_signal: int | None = None
    kill_signal: int | None = None
    stall: Stall | None = None
    evidence: str = ""
    oom_kills: int | None = None
    notices: Notices | None = None

    @cached_property
    def reported(self) -> Failure | None:
        """The first failure that a rank has reported."""
        return first_failure(rank.failure for rank in self.ranks)

    @cached_property
    def unreported(self) -> Failure | None:
        """The first rank that has ended without a report: killed, or with just an exit code."""
        return first_failure(_unreported(rank, self.stop_signal, self.oom_kills) for rank in self.ranks)

    @property
    def any_is_left(self) -> bool:
        """Whether a rank could not be killed, and still holds its device and files."""
        return any(rank.code is None for rank in self.ranks)

    def ended_by_failure(self, failure: Failure, why: str, reason: str = "") -> RunEnd:
        """The end of a run with this first failure; `why`: in a line."""
        rank = self.ranks[failure.rank]
        lasts, at_start = failure.lasts or self.any_is_left, Milestone.STEPPED not in rank.reached
        return RunEnd(failure.exit_code, why, lasts, failure.rank, at_start, rank.step, reason)


def report_end(end: RanksAtEnd) -> RunEnd:
    """Print what ended the run; returns how it has ended."""
    return next(run_end for ending in ENDINGS if (run_end := ending(end)) is not None)


# -- ways to end: each prints what is to be said and returns how the run has ended, or None if it is another way -------


def _stood_still(end: RanksAtEnd) -> RunEnd | None:
    if (stall := end.stall) is None:
        return None
    say_on_stderr(f"{stall.text}\nAll ranks were ended. {end.evidence}".rstrip())
    step = end.ranks[stall.rank or 0].step
    return RunEnd(STALLED, stall.text, end.any_is_left, rank=stall.rank, step=step, reason=stall.cause)


def _ended_at_once(end: RanksAtEnd) -> RunEnd | None:
    if end.kill_signal is None:
        return None
    if end.notices is not None:
        is_ready = any(Milestone.READY in rank.reached for rank in end.ranks)
        say_now(end.notices.cut_short() if is_ready else end.notices.ended_unasked)
    return _by_signal(end.kill_signal)


def _stopped_as_asked(end: RanksAtEnd) -> RunEnd | None:
    """All have ended as they were asked to, with codes of their own or by the signal."""
    if end.stop_signal is None or end.unreported is not None:
        return None
    if end.reported is not None and end.reported.exit_code != INTERRUPTED:
        return None
    if all(rank.code is not None and rank.code >= 0 and rank.failure is None for rank in end.ranks):
        return RunEnd(max(rank.code or 0 for rank in end.ranks))
    say_on_stderr(f"Stopped by {signal_name(end.stop_signal)}; all ranks have ended.")
    return _by_signal(end.stop_signal)


def _by_signal(number: int) -> RunEnd:
    return RunEnd(128 + number, f"ended by {signal_name(number)}")


def _ended_well(end: RanksAtEnd) -> RunEnd | None:
    if end.reported is not None or end.unreported is not None:
        return None
    codes = [rank.code for rank in end.ranks if rank.code is not None and not rank.ended_by_us]
    return RunEnd(max(codes, default=FAILED))


def _died_first(end: RanksAtEnd) -> RunEnd | None:
    """A rank ended without a report before any other reported a failure, which is then a consequence.

    Of a failure that says only that a rank was lost nothing is printed: here is said which, and how it ended.
    """
    dead, follows = end.unreported, end.reported
    if dead is None or (follows is not None and not follows.lost and follows.time_ns <= dead.time_ns):
        return None
    if follows is not None and not follows.lost:
        say_on_stderr(f"Rank {follows.rank} failed as well:\n{follows.text}\n")
    say_on_stderr(dead.text)
    was_killed = (end.ranks[dead.rank].code or 0) < 0
    return end.ended_by_failure(dead, dead.text.removesuffix(_OTHERS_STOPPED), "killed" if was_killed else "")


def _failed_first(end: RanksAtEnd) -> RunEnd | None:
    """A rank reported its failure first; others may have died of it, or were stopped while it waited for them."""
    first = end.reported
    if first is None:
        return None
    if end.unreported is not None:
        say_on_stderr(f"{end.unreported.text}\n")
    title = f"Rank {first.rank} has lost another rank:" if first.lost else f"Rank {first.rank} failed first:"
    say_on_stderr(first.text if first.exit_code == BAD_INPUT else f"{title}\n{first.text}")
    stopped = [rank for rank in end.ranks if rank.stopped]
    for rank in stopped:
        say_on_stderr(f"\n{_of_stopped(rank)}")
    ended_well = [(code, [str(rank.rank) for rank in end.ranks if rank.code == code]) for code in (DONE, PREEMPTED)]
    gone = [f"{_ranks(ranks)} ended before that with exit code {code}" for code, ranks in ended_well if ranks]
    if first.lost and gone:
        say_on_stderr(f"\n{', '.join(gone)}, and no rank has failed by itself.")
    elif first.cause and not stopped:
        say_on_stderr(f"\nRank {first.rank} failed first{end.ranks[first.rank].at}: {first.why}")
    return end.ended_by_failure(first, f"rank {first.rank} failed: {first.why}")


ENDINGS: Sequence[Callable[[RanksAtEnd], RunEnd | None]] = (
    _stood_still,
    _ended_at_once,
    _stopped_as_asked,
    _ended_well,
    _died_first,
    _failed_first,
)
"""The ways in which a run ends, in order: the first that applies counts."""


# -- words -------------------------------------------------------------------------------------------------------------


def _ranks(names: Sequence[str]) -> str:
    return f"Rank{'s' if len(names) > 1 else ''} {listed(names, 8)}"


def _of_stopped(rank: LocalRank) -> str:
    """What is said of a rank that was stopped, which is why the rank that waited for it failed."""
    return (
        f"Rank {rank.rank} (process {rank.pid}) was stopped by a signal when that happened (SIGSTOP, Ctrl-Z or a"
        " debugger), so whoever waited for it waited in vain: see who stops processes here, and start the run again. A"
        " rank that `kill -CONT` wakes before launch.timeout_s is over goes on."
    )


def _unreported(rank: LocalRank, stop_signal: int | None, oom_kills: int | None) -> Failure | None:
    """The failure of a rank that ended without a report, at the earliest possible time; None if that is none."""
    if rank.code in (None, 0, PREEMPTED) or rank.ended_by_us or rank.failure is not None:
        return None
    if rank.code > 0:
        text = f"Rank {rank.rank} ended with exit code {rank.code}{_OTHERS_STOPPED}"
        return Failure(rank.rank, (rank.ended_ns or 0) - _SEEN_LATE_NS, rank.code, text)
    if stop_signal is not None and rank.code == -stop_signal:
        return None
    name = signal_name(-rank.code)
    hint = _who_kills(oom_kills) if name == "SIGKILL" else ""
    text = f"Rank {rank.rank} was ended by {name}{hint}{rank.at}{_OTHERS_STOPPED}"
    late_ns = _KILL_SEEN_LATE_NS if name == "SIGKILL" else _SEEN_LATE_NS
    return Failure(rank.rank, (rank.ended_ns or 0) - late_ns, FAILED, text)


def _who_kills(oom_kills: int | None) -> str:
    """What the kernel's count of out-of-memory kills says about a SIGKILL."""
    if oom_kills is None:
        return " (often the kernel's out-of-memory killer, whose count cannot be read here)"
    if oom_kills:
        return f" (the kernel's out-of-memory killer, which has ended {oom_kills} here since the start)"
    return " (not by the kernel's out-of-memory killer, which has ended nothing here)"
