"""What each rank of a mesh reports as an exchange has failed, by the store, and what that says together.

A rank leaves one report, in each of its groups. It need not know the groups of all others: those whose reports it reads
name theirs. Of many ranks the reports are asked for and read at once: all ranks do that at the same time, of one store.
Rank 0, which may be the host of the store, stays until the others have read. Where the store is gone, a rank has its
own report alone.

Ranks whose time is over have run the same where, in one of their groups, all have come to the same, if late.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from terrazzo.engine.labels.rank_places import RankPlace, apart_text, places_text
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.errors import RanksApart, TimedOut, timed_out

__all__ = ["FailureReports", "RankReport"]


@dataclass(frozen=True)
class RankReport:
    """What a rank reports.

    Attributes:
        groups: ranks of each group of its mesh, by the group's name.
        pending: the exchanges that it has begun and not ended, the oldest first: the group, and the place.
        seen: places that it has seen, its own among them, where these differ.
    """

    groups: dict[str, list[int]]
    pending: list[tuple[str, RankPlace]]
    seen: dict[int, RankPlace] = field(default_factory=dict)

    @classmethod
    def of_json(cls, text: str | bytes) -> RankReport:
        told = json.loads(text)
        pending = [(group, RankPlace(*place)) for group, place in told["pending"]]
        return cls(told["groups"], pending, {int(rank): RankPlace(*place) for rank, place in told["seen"].items()})

    def keys(self) -> dict[int, list[str]]:
        """Where the store has reports of the ranks of its groups, by rank: each in the groups that it is in as well."""
        keys: dict[int, list[str]] = {}
        for group, ranks in self.groups.items():
            for rank in ranks:
                keys.setdefault(rank, []).append(f"{_left_in(group)}/{rank}")
        return keys

    def places_in(self, group: str) -> list[RankPlace]:
        """Its pending exchanges in one group."""
        return [place for of_group, place in self.pending if of_group == group]

    def own_words(self, rank: int, seen: Mapping[int, RankPlace]) -> RankPlace | None:
        """Where this report's `rank` has been `seen`, in its own words: others may not know the names of its units."""
        if rank in self.seen or rank not in seen:
            return self.seen.get(rank)
        own = next((place for _, place in self.pending if place.code == seen[rank].code), None)
        return own and own._replace(detail=seen[rank].detail)


class FailureReports:
    """The reports of the ranks of a mesh, as far as this one knows: `own` is its own."""

    def __init__(self, own: RankReport) -> None:
        self._own = own
        self._reports: dict[int, RankReport] = {}

    def any(self) -> bool:
        """Whether a rank with which this one exchanges has left one."""
        with contextlib.suppress(RuntimeError):
            return any(default_store().check([_left_in(group)]) for group in self._own.groups)
        return False

    def leave(self, seen: Mapping[int, RankPlace]) -> None:
        """Leave this rank's. Its first stays: a later one knows less of what it had begun."""
        rank, own = dist.get_rank(), replace(self._own, seen=dict(seen))
        self._reports[rank] = own
        text = json.dumps(asdict(own))
        with contextlib.suppress(RuntimeError):
            for key in own.keys()[rank]:
                first = RankReport.of_json(default_store().compare_set(key, "", text))
                self._reports[rank] = replace(first, seen=first.seen or own.seen)
            for group in own.groups:
                default_store().set(_left_in(group), "by a rank")

    def read(self, patience_s: float) -> None:
        """Read those of all ranks, as far as they come in time."""
        until = time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):
            for _ in _looks(until):
                if not (missing := self._missing()):
                    break
                ranks = {key: rank for rank, keys in missing.items() for key in keys}
                there = _present([*ranks])
                for key, text in zip(there, default_store().multi_get(there) if there else [], strict=True):
                    self._reports[ranks[key]] = RankReport.of_json(text)
            self._say_read(until)

    def _say_read(self, until: float) -> None:
        """Say that this rank has read what there is; rank 0 waits until all others that are there have, too."""
        rank = dist.get_rank()
        read = {each: f"{report.keys()[each][0]}/read" for each, report in self._reports.items()}
        default_store().set(read[rank], "by its rank")
        for _ in _looks(until) if rank == 0 else ():
            if default_store().check([*read.values()]):
                break

    def _missing(self) -> dict[int, list[str]]:
        """The keys of ranks whose reports have not come, by rank."""
        keys: dict[int, list[str]] = {}
        for report in self._reports.values():
            for rank, of_rank in report.keys().items():
                if rank not in self._reports:
                    keys.setdefault(rank, []).extend(of_rank)
        return keys

    def apart(self) -> RanksApart | None:
        """The error of ranks of which one has seen that they are apart; None where none has."""
        seen: dict[int, RankPlace] = {}
        for report in self._reports.values():
            seen |= report.seen
        if not seen:
            return None
        own = {
            rank: place for rank, report in self._reports.items() if (place := report.own_words(rank, seen)) is not None
        }
        places = self._oldest_pending() | seen | own  # each knows itself best
        return RanksApart(apart_text(places, unknown=self._unknown(places)))

    def too_late(self, error: BaseException) -> RanksApart | TimedOut:
        """The error of ranks whose time is over: they are apart where all wait, and in no group for the same."""
        shared = self._shared()
        places = self._oldest_pending() | shared
        if not (shared or self._missing()):
            return RanksApart(apart_text(places, _IN_VAIN))
        why = str(error) if isinstance(error, TimedOut) else f"{_NOT_COME if timed_out(error) else _LATE} {_IF_SLOW}"
        return TimedOut(f"{why} Waiting: {places_text(places, self._unknown(places))}.")

    def _oldest_pending(self) -> dict[int, RankPlace]:
        """The place of each rank: what it has waited in for longest."""
        return {rank: report.pending[0][1] for rank, report in self._reports.items() if report.pending}

    def _shared(self) -> dict[int, RankPlace]:
        """The places of ranks in groups all of whose ranks have come to the same."""
        shared: dict[int, RankPlace] = {}
        groups = {group: ranks for report in self._reports.values() for group, ranks in report.groups.items()}
        for group, ranks in groups.items():
            if all(rank in self._reports for rank in ranks):
                first, *others = [self._reports[rank].places_in(group) for rank in ranks]
                same = [place for place in first if all(place in each for each in others)]
                shared |= dict.fromkeys(ranks, same[0]) if same and others else {}
        return shared

    def _unknown(self, places: Mapping[int, RankPlace]) -> list[int]:
        """Ranks that are in none of the places."""
        return [rank for rank in self._missing() if rank not in places]


def _left_in(group: str) -> str:
    """The key that is there where a rank has left a report in that group; below it are those of reports."""
    return f"terrazzo/report/{group}"


def _present(keys: Sequence[str]) -> list[str]:
    """Those of the keys that the store has. It says of many at once whether it has all: halves are asked for then."""
    if not keys or default_store().check([*keys]):
        return [*keys]
    half = len(keys) // 2
    return [*_present(keys[:half]), *_present(keys[half:])] if half else []


def _looks(until: float) -> Iterator[None]:
    """Turns of looking for something in the store, ever more seldom: other ranks do so, too."""
    pause_s = 0.01
    while time.monotonic() < until:
        yield
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.16)


_IN_VAIN = ", and have waited for each other until the time of their process group was over"
_NOT_COME = "Other ranks have not come to an exchange in time: they may have ended, or run something else."
_LATE = "Another rank has waited in vain, for this rank or for others, until the time of their process group was over."
_IF_SLOW = "See what each has printed. Where one is only slow, give init_process_group a longer timeout."
