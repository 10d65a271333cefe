"""What is raised where an exchange has failed: who has ended, or where each rank of the mesh is.

A rank sees in a message that another is at another place, or its time is over. Those that wait for it along other axes,
or in exchanges of another kind, hear nothing of that. So it leaves word of where it is in the store by which the
default group was made, and breaks off its connections along all axes. What the others wait in fails at once; they find
its word, leave their own, and break off as well. So all raise the same, with the place of each, and nothing is
exchanged on this mesh from then on. Before that nothing is written: steps cost no more.

Several exchanges of a rank are under way at a time, in threads, and any may fail first. So its word names all of them.
Where time is over, ranks that run the same have waited in a group for what all of its ranks have come to, if late.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from terrazzo.engine.comm.tags import NEVER_SENT
from terrazzo.engine.instrumentation.label import Label
from terrazzo.engine.instrumentation.places import NOT_THE_SAME, PlacesDiffer, RankPlace, edits_of, places_text
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.engine.runtime.process_groups import timeout_s_of
from terrazzo.errors import ConnectionLost, RanksApart, TimedOut, lost_a_rank, timed_out
from terrazzo.messages import of_ranks

__all__ = ["Exchange", "MeshGroups", "hang_up_gloo"]

_WORD_S = 2.0
"""How long a rank looks for the words of others; half of the group's own time, where that is shorter."""

_UNDER_WAY: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Label]] = weakref.WeakKeyDictionary()
"""What this rank has begun to exchange in a group and not ended, by its number; what has failed stays."""
_numbers = itertools.count()


class MeshGroups:
    """The process groups in which this rank exchanges along the axes of a mesh: what fails in one, fails in all."""

    def __init__(self) -> None:
        self._hang_ups: dict[dist.ProcessGroup, list[Callable[[], None]]] = {}

    def add(self, group: dist.ProcessGroup, *hang_ups: Callable[[], None]) -> None:
        """Take in a group, and what has its other ranks hear that nothing comes from here any more."""
        self._hang_ups.setdefault(group, []).extend(hang_ups)

    def __iter__(self) -> Iterator[dist.ProcessGroup]:
        return iter(self._hang_ups)

    def break_off(self) -> None:
        """This rank exchanges nothing any more along any axis: others hear that at once, where a backend can."""
        for hang_ups in self._hang_ups.values():
            while hang_ups:
                hang_ups.pop()()


def hang_up_gloo(group: dist.ProcessGroup) -> None:
    """Close the connections of a group of gloo's, which says so by a message that comes too late."""
    for other in range(group.size()):  # from one that has ended it comes as an error, which nobody else is told of
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device=HOST)], other, NEVER_SENT).wait(timedelta(milliseconds=1))


class Exchange:
    """An exchange in which all ranks of a group meet, from when this rank begins it; parts may be in other threads."""

    def __init__(self, mesh_groups: MeshGroups, group: dist.ProcessGroup, label: Label) -> None:
        self._mesh_groups, self._label = mesh_groups, label
        self._under_way, self._number = _UNDER_WAY.setdefault(group, {}), next(_numbers)
        self._under_way[self._number] = label
        self._patience_s = min(_WORD_S, timeout_s_of(group, HOST) / 2)

    @contextlib.contextmanager
    def part(self, *, last: bool = False) -> Iterator[None]:
        """Inside, others are waited for. The exchange has ended after the `last` part.

        Raises:
            RanksApart: where ranks of the mesh are at different places.
            TimedOut: where time is over otherwise.
            ConnectionLost: where another rank has ended or failed, and neither is known of any.
        """
        try:
            yield
        except BaseException as error:
            if (failed := self._explained(error)) is not None:
                raise failed from (None if isinstance(error, PlacesDiffer) else error)
            del self._under_way[self._number]
            raise
        if last:
            del self._under_way[self._number]

    def _explained(self, error: BaseException) -> RuntimeError | None:
        """What to raise where it has failed with `error`; None if that is of anything else."""
        if not (isinstance(error, PlacesDiffer) or timed_out(error) or lost_a_rank(error)):
            return None
        words = _Words(self._mesh_groups)
        if lost_a_rank(error) and not words.any():
            why = str(error) if isinstance(error, ConnectionLost) else _ENDED
            return ConnectionLost(f"{why} Here it was the turn of {self._label}.")
        words.leave(error.places if isinstance(error, PlacesDiffer) else {})
        self._mesh_groups.break_off()
        words.read(self._patience_s)
        return words.apart() or words.too_late(error)


@dataclass
class _Word:
    """What a rank leaves for the others.

    Attributes:
        groups: ranks of each group of its mesh.
        waited: what it has waited in, the oldest first: the group, and the place.
        seen: places that it has seen, its own among them, where these differ.
    """

    groups: dict[str, list[int]] = field(default_factory=dict)
    waited: list[tuple[str, RankPlace]] = field(default_factory=list)
    seen: dict[int, RankPlace] = field(default_factory=dict)

    @classmethod
    def of_json(cls, text: str | bytes) -> _Word:
        told = json.loads(text)
        waited = [(group, RankPlace(*place)) for group, place in told["waited"]]
        return cls(told["groups"], waited, {int(rank): RankPlace(*place) for rank, place in told["seen"].items()})

    def keys(self) -> dict[int, list[str]]:
        """Where words of the ranks of its groups are, by rank: each in the groups that it is in as well."""
        keys: dict[int, list[str]] = {}
        for group, ranks in self.groups.items():
            for rank in ranks:
                keys.setdefault(rank, []).append(f"terrazzo/waited/{group}/{rank}")
        return keys

    def places_in(self, group: str) -> list[RankPlace]:
        """Where it has waited, of those in one group."""
        return [place for waited_in, place in self.waited if waited_in == group]


class _Words:
    """Where the ranks of a mesh are as one of them has failed: each leaves word once, in each of its groups.

    A rank need not know the groups of all others: those whose words it reads name theirs. Where the store is gone, it
    has its own word alone.
    """

    def __init__(self, groups: MeshGroups) -> None:
        under_way = {str(group.group_name): [*_UNDER_WAY.get(group, {}).items()] for group in groups}
        waited = sorted((number, name, label.place()) for name, each in under_way.items() for number, label in each)
        ranks = {str(group.group_name): dist.get_process_group_ranks(group) for group in groups}
        self._own = _Word(ranks, [(name, place) for _, name, place in waited])
        self._words: dict[int, _Word] = {}

    def any(self) -> bool:
        """Whether one has."""
        with contextlib.suppress(RuntimeError):
            return any(default_store().check([key]) for keys in self._own.keys().values() for key in keys)
        return False

    def leave(self, seen: Mapping[int, RankPlace]) -> None:
        """This rank's. Its first word stays: later ones know less of what it had begun."""
        rank, self._own.seen = dist.get_rank(), dict(seen)
        self._words[rank] = self._own
        text = json.dumps(asdict(self._own))
        with contextlib.suppress(RuntimeError):
            for key in self._own.keys()[rank]:
                first = _Word.of_json(default_store().compare_set(key, "", text))
                self._words[rank] = replace(first, seen=first.seen or self._own.seen)

    def read(self, patience_s: float) -> None:
        """Those of all ranks, as far as they come in time."""
        until = time.monotonic() + patience_s
        with contextlib.suppress(RuntimeError):
            while (silent := self._silent()) and time.monotonic() < until:
                for rank, keys in silent.items():
                    if (key := next((key for key in keys if default_store().check([key])), None)) is not None:
                        self._words[rank] = _Word.of_json(default_store().get(key))
                time.sleep(0.01)

    def _silent(self) -> dict[int, list[str]]:
        """Where the words of ranks would be of which none has come."""
        keys: dict[int, list[str]] = {}
        for word in self._words.values():
            for rank, of_rank in word.keys().items():
                if rank not in self._words:
                    keys.setdefault(rank, []).extend(of_rank)
        return keys

    def apart(self) -> RanksApart | None:
        """The error of ranks of which one has seen that they are apart; None where none has."""
        seen: dict[int, RankPlace] = {}
        for word in self._words.values():
            seen |= word.seen
        if not seen:
            return None
        places = {rank: word.waited[0][1] for rank, word in self._words.items() if word.waited} | seen
        places |= {rank: word.seen[rank] for rank, word in self._words.items() if rank in word.seen}  # who knows best
        return RanksApart(f"{NOT_THE_SAME}: {places_text(places)}{self._unknown(places)}. {edits_of(places)}")

    def too_late(self, error: BaseException) -> RanksApart | TimedOut:
        """The error of ranks whose time is over: they are apart where all have waited, in no group for the same."""
        places = {rank: word.waited[0][1] for rank, word in self._words.items()}
        shared = self._shared()
        places |= shared
        if not (shared or self._silent()):
            return RanksApart(
                f"{NOT_THE_SAME}, and have waited for each other until the time of their process group was over: "
                f"{places_text(places)}. {edits_of(places)}"
            )
        why = str(error) if isinstance(error, TimedOut) else f"{_NOT_COME if timed_out(error) else _LATE} {_IF_SLOW}"
        return TimedOut(f"{why} Waiting: {places_text(places)}{self._unknown(places)}.")

    def _shared(self) -> dict[int, RankPlace]:
        """The places of ranks in groups all of whose ranks have come to the same."""
        shared: dict[int, RankPlace] = {}
        groups = {group: ranks for word in self._words.values() for group, ranks in word.groups.items()}
        for group, ranks in groups.items():
            if all(rank in self._words for rank in ranks):
                first, *others = [self._words[rank].places_in(group) for rank in ranks]
                same = [place for place in first if all(place in each for each in others)]
                shared |= dict.fromkeys(ranks, same[0]) if same and others else {}
        return shared

    def _unknown(self, places: Mapping[int, RankPlace]) -> str:
        silent = [rank for rank in self._silent() if rank not in places]
        return f"; of {of_ranks(silent)} nothing is known" if silent else ""


_ENDED = "Another rank has ended or failed: see what it has printed."
_NOT_COME = "Other ranks have not come to an exchange in time: they may have ended, or run something else."
_LATE = "Another rank has waited in vain, for this rank or for others, until the time of their process group was over."
_IF_SLOW = "See what each has printed. Where one is only slow, give init_process_group a longer timeout."
