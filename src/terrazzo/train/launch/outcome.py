"""How ranks that were started together have ended: what failed first is said once, last, with its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from terrazzo.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, PREEMPTED, STALLED
from terrazzo.train.launch.launcher_pipe import Failure, first_failure
from terrazzo.train.launch.local_ranks import LocalRank, LocalRanks
from terrazzo.train.launch.notices import Ended, Notices, say_now

__all__ = ["tell_outcome"]

_SEEN_LATE_NS = 200_000_000
"""By how much a death may be seen too late. The others' errors, of connections to the dead, come as soon as it."""
_KILL_SEEN_LATE_NS = 2_000_000_000
"""The same of a SIGKILL: no rank ends so because another has failed, and a busy machine lets the launcher wait."""
_REST = "; the other ranks were stopped."


def tell_outcome(
    started: LocalRanks, stopped_by: int | None, kept: str, asked: int | None, notices: Notices | None
) -> Ended:
    """How ranks have ended, once that is said."""
    if (stall := started.stall) is not None:
        print(f"{stall.text}\nAll ranks were ended. {kept}".rstrip(), file=sys.stderr)
        lasts = any(rank.code is None for rank in started.ranks)
        return Ended(STALLED, stall.text, lasts, rank=stall.rank, reason=stall.cause)
    if stopped_by is None:
        return _report(started.ranks, asked, started.oom_kills)
    if notices is not None:
        begun = any(rank.begun for rank in started.ranks)
        say_now(notices.cut_short() if begun else notices.unbegun)
    return Ended(128 + stopped_by)


def _report(ranks: Sequence[LocalRank], asked: int | None = None, oom_kills: int | None = None) -> Ended:
    """Say what ended the run, what came first last; how it has ended.

    Args:
        asked: the signal that was passed on to all ranks: that they died of it is no failure.
        oom_kills: how many processes the kernel has ended meanwhile for want of memory, if that is known.
    """
    first = first_failure(rank.failure for rank in ranks)
    silent = first_failure(_silent(rank, asked, oom_kills) for rank in ranks)
    if asked is not None and silent is None and (first is None or first.exit_code == INTERRUPTED):
        return Ended(_stopped(ranks, asked))
    if first is None and silent is None:
        return Ended(
            max((rank.code for rank in ranks if rank.code is not None and not rank.ended_by_us), default=FAILED)
        )
    if first is None or (silent is not None and silent.time_ns < first.time_ns):
        assert silent is not None
        if first is not None:
            print(f"Rank {first.rank} failed as well:\n{first.text}\n", file=sys.stderr)
        print(silent.text, file=sys.stderr)
        ended = _ended_by(silent, silent.text.removesuffix(_REST), ranks)
        return ended._replace(reason="killed") if (ranks[silent.rank].code or 0) < 0 else ended
    if silent is not None:
        print(f"{silent.text}\n", file=sys.stderr)
    if first.exit_code == BAD_INPUT:
        print(first.text, file=sys.stderr)
    else:
        print(f"Rank {first.rank} failed first:\n{first.text}", file=sys.stderr)
    for rank in ranks:
        if rank.stopped:
            print(f"\n{_stopped_rank(rank)}", file=sys.stderr)
    *trace, why = first.text.splitlines()
    if trace and not any(rank.stopped for rank in ranks):  # whoever looks at the end of a long output finds it there
        print(f"\nRank {first.rank} failed first{ranks[first.rank].at}: {why}", file=sys.stderr)
    return _ended_by(first, f"rank {first.rank} failed: {why}", ranks)


def _ended_by(failure: Failure, why: str, ranks: Sequence[LocalRank]) -> Ended:
    """What the system does not let go of still has its device and its files."""
    lasts, begun = failure.lasts or any(rank.code is None for rank in ranks), ranks[failure.rank].at
    step = ranks[failure.rank].step
    return Ended(failure.exit_code, why, lasts, None if begun else failure.rank, failure.rank, step)


def _stopped_rank(rank: LocalRank) -> str:
    """What stood still was there before what has waited for it failed, so this is said after that."""
    return (
        f"Rank {rank.rank} (process {rank.pid}) was stopped by a signal when that happened (SIGSTOP, Ctrl-Z or a"
        " debugger), so whoever waited for it waited in vain: see who stops processes here, and start the run again. A"
        " rank that `kill -CONT` wakes before launch.timeout_s is over goes on."
    )


def _stopped(ranks: Sequence[LocalRank], asked: int) -> int:
    """The exit code of ranks that have ended as they were asked to: their own, where they have one."""
    died = [rank.rank for rank in ranks if rank.code is None or rank.code < 0 or rank.failure is not None]
    if not died:
        return max(rank.code or 0 for rank in ranks)
    print(f"Stopped by {signal.Signals(asked).name}; all ranks have ended.", file=sys.stderr)
    return 128 + asked


def _silent(rank: LocalRank, asked: int | None, oom_kills: int | None) -> Failure | None:
    """How a rank ended without a word, and when at the earliest; None if it did not, was asked to, or ended well."""
    if rank.code in (None, 0, PREEMPTED) or rank.ended_by_us or rank.failure is not None:
        return None
    if rank.code > 0:
        said = f"Rank {rank.rank} ended with exit code {rank.code}{_REST}"
        return Failure(rank.rank, (rank.ended_ns or 0) - _SEEN_LATE_NS, rank.code, said)
    if asked is not None and rank.code == -asked:
        return None
    name = signal.Signals(-rank.code).name
    hint = _who_kills(oom_kills) if name == "SIGKILL" else ""
    said = f"Rank {rank.rank} was ended by {name}{hint}{rank.at}{_REST}"
    late_ns = _KILL_SEEN_LATE_NS if name == "SIGKILL" else _SEEN_LATE_NS
    return Failure(rank.rank, (rank.ended_ns or 0) - late_ns, FAILED, said)


def _who_kills(oom_kills: int | None) -> str:
    """What the kernel's count says of a SIGKILL."""
    if oom_kills is None:
        return " (often the kernel's out-of-memory killer, whose count cannot be read here)"
    if oom_kills:
        return f" (the kernel's out-of-memory killer, which has ended {oom_kills} here since the start)"
    return " (not by the kernel's out-of-memory killer, which has ended nothing here)"
