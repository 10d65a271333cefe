"""Finds why a run stands still: which rank is at fault, what became of it, and which exchange it is missing from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from terrazzo.messages import listed
from terrazzo.telemetry.watchdog.rank_progress import ExchangeKey, RankProgress
from terrazzo.telemetry.watchdog.stall_causes import SLOWED_BY_SIGNALS, STALL_CAUSES, StallCause
from terrazzo.telemetry.watchdog.warden_links import RunMachine

__all__ = ["GONE", "ProcessFacts", "Stall", "cut_off", "find_stall", "hindered"]

_UNMATCHED = ("send", "all_to_all")
"""Kinds of exchanges whose ordinals differ between ranks, or that not all ranks of an axis take part in."""

GONE = ("", "Z", "X")
"""States of processes that no longer exist."""


class ProcessFacts(NamedTuple):
    """What the system says about a rank's process.

    Attributes:
        state: as in `/proc/PID/stat`; empty if there is no such process.
        busy: whether it or its children have used the CPU since the run stands still.
        on_drive: whether it has waited for a drive or a file system since then.
    """

    state: str
    busy: bool
    on_drive: bool = False

    @property
    def gone(self) -> bool:
        return self.state in GONE

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


class Stall(NamedTuple):
    """A stall: its cause, the ranks at fault, and a message of one to three sentences."""

    cause: StallCause
    ranks: Sequence[int]
    text: str

    @property
    def rank(self) -> int | None:
        """The rank at fault; None if there are several."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    @property
    def is_final(self) -> bool:
        """Whether waiting longer is useless, so that the run is to be ended."""
        return STALL_CAUSES[self.cause].ends


def find_stall(
    ranks: Mapping[int, RankProgress], facts: Mapping[int, ProcessFacts], now: int, *, own_loop: bool = False
) -> Stall:
    """Why a run stands still in which nothing has happened for long enough; see `STALL_CAUSES`.

    Args:
        ranks: progress of each rank, by number.
        facts: of each rank's process.
        now: nanoseconds of CLOCK_MONOTONIC.
        own_loop: whether the loop is the user's: what it does between steps is not known.
    """
    absent = [rank for rank in ranks if not ranks[rank].waits]
    culprits_of: dict[StallCause, list[int]] = {  # in this order: the first cause that some rank has is the one
        "died": [rank for rank in ranks if facts[rank].gone],
        "stopped": [rank for rank in ranks if facts[rank].stopped],
        "slow": [rank for rank in absent if facts[rank].busy],
        "input": [rank for rank in absent if ranks[rank].phase == "input"],
        "outside": [rank for rank in absent if own_loop and ranks[rank].phase in ("other", "")],
        "drive": [rank for rank in absent if facts[rank].on_drive],
        "stuck": absent,
    }
    for cause, culprits in culprits_of.items():
        if culprits:
            return _of_some(cause, culprits, ranks, now)
    return _apart(ranks, now)


def hindered(rank: int, share: float, ranks: Mapping[int, RankProgress]) -> Stall:
    """The stall of a rank that runs, but is stopped over and over, for that `share` of the time."""
    others = [each for each in ranks if each != rank]
    who, go = ("Ranks", "go") if len(others) > 1 else ("Rank", "goes")
    go_on = f"{who} {_listed(others)} {go}"
    return Stall("slow", [rank], SLOWED_BY_SIGNALS.format(who=_named([rank], ranks), share=share, others=go_on))


def _of_some(cause: StallCause, culprits: Sequence[int], ranks: Mapping[int, RankProgress], now: int) -> Stall:
    others = [rank for rank in ranks if rank not in culprits and ranks[rank].waits]
    missing, first = "", ranks[culprits[0]]
    if (key := _missed(culprits, others, ranks)) is not None:
        missing = f" Missing from {_teller(key, others, ranks).words(key)}."
    elif first.phase:
        missing = f" Last in phase {first.phase}, step {first.step + 1}."
    waited = f" {_waited(others, ranks, now)}." if others else ""
    who = _named(culprits, ranks)
    text = STALL_CAUSES[cause].text(len(culprits), who=who, missing=missing, waited=waited)
    return Stall(cause, culprits, text)


def _missed(culprits: Sequence[int], others: Iterable[int], ranks: Mapping[int, RankProgress]) -> ExchangeKey | None:
    """The exchange that others have waited for longest and that not all culprits have come to; if there is none, one
    that culprits take part in.
    """
    waits = [(event.time, key, ranks[rank]) for rank in others for key, event in ranks[rank].waits.items()]
    shared = [each for each in sorted(waits, key=lambda each: each[0]) if set(culprits) & set(each[2].ranks(each[1]))]
    absent = [each for each in shared if not all(ranks[rank].has_come_to(each[1]) for rank in culprits)]
    return next((key for _, key, _ in [*absent, *shared]), None)


def _teller(key: ExchangeKey, others: Iterable[int], ranks: Mapping[int, RankProgress]) -> RankProgress:
    return next(ranks[rank] for rank in others if key in ranks[rank].waits)


def _apart(ranks: Mapping[int, RankProgress], now: int) -> Stall:
    """The stall where every rank waits for others."""
    waits = [(rank, key) for rank, progress in ranks.items() for key in progress.waits]
    everyone = list(ranks)
    waited = _waited(everyone, ranks, now)
    for rank, key in waits:
        for other in (each for each in ranks[rank].ranks(key) if each in ranks and each != rank):
            differs = not ranks[other].has_come_to(key) or _differ(key, ranks[rank], ranks[other])
            if key[1] not in _UNMATCHED and differs:
                there = next(iter(ranks[other].waits))
                text = STALL_CAUSES["desynchronised"].text(
                    rank=rank,
                    other=other,
                    who=_named([rank], ranks, first=False),
                    others=_named([other], ranks, first=False),
                    exchange=ranks[rank].words(key),
                    theirs=ranks[other].words(there),
                    waited=waited,
                )
                return Stall("desynchronised", [rank, other], text)
    exchange = ranks[everyone[0]].words(next(iter(ranks[everyone[0]].waits)))
    return Stall("lost", everyone, STALL_CAUSES["lost"].text(exchange=exchange, waited=waited))


def cut_off(
    place: RunMachine, silent_s: float, here: Mapping[int, RankProgress], now: int, stall_s: float
) -> Stall | None:
    """The stall of ranks here that wait for ranks of a silent machine; None while none has waited for `stall_s`.

    Args:
        place: the silent machine.
        silent_s: for how long it has been silent.
        here: progress of this machine's ranks.
        now: nanoseconds of CLOCK_MONOTONIC.
    """
    waits = [(event.time, rank, key) for rank, progress in here.items() for key, event in progress.waits.items()]
    for since, rank, key in sorted(waits, key=lambda each: each[0]):
        if set(here[rank].ranks(key)) & set(place.ranks) and now - since >= stall_s * 1e9:
            waiting = [rank for rank in here if here[rank].waits]
            of = f"rank{'s' if len(place.ranks) > 1 else ''} {_listed(place.ranks)}"
            text = STALL_CAUSES["partition"].text(
                host=place.host,
                who=of,
                silent_s=silent_s,
                exchange=here[rank].words(key),
                waited=_waited(waiting, here, now),
            )
            return Stall("partition", place.ranks, text)
    return None


def _differ(key: ExchangeKey, here: RankProgress, there: RankProgress) -> bool:
    """Whether two ranks have issued different exchanges under the same number; False if that is no longer known."""
    one, other = here.issued(key), there.issued(key)
    if one is None or other is None:
        return False
    same_size = one.value == other.value or key[1] == "broadcast"  # only its source sends
    return not same_size or (one.unit, one.number, one.purpose) != (other.unit, other.number, other.purpose)


def _named(culprits: Sequence[int], ranks: Mapping[int, RankProgress], *, first: bool = True) -> str:
    if len(culprits) > 1:
        return f"Ranks {_listed(culprits)}"
    table = ranks[culprits[0]].table
    where = f" (host {table['host']}, pid {table['pid']})" if table else ""
    return f"{'Rank' if first else 'rank'} {culprits[0]}{where}"


def _waited(others: Sequence[int], ranks: Mapping[int, RankProgress], now: int) -> str:
    longest = max(now - event.time for rank in others for event in ranks[rank].waits.values())
    who, have = ("Ranks", "have") if len(others) > 1 else ("Rank", "has")
    return f"{who} {_listed(others)} {have} waited {longest / 1e9:.0f} s"


def _listed(numbers: Sequence[int]) -> str:
    """Numbers in order, neighbours as ranges."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return listed(words, 8)
