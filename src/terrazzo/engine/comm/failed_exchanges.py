"""What is raised where an exchange has failed: who has ended, or, where its time is over, where each rank has waited.

Ranks that wait in exchanges of different kinds hear nothing of each other: one waits for all at the end of a pass, say,
which is an all-reduce of gloo's, and the other in a gather. So whose time is over first leaves word in the store by
which the process group was made, and breaks its connections off: what the others wait in fails at once, and they leave
word as well. Before that nothing is written: steps cost no more.

A rank that has seen in a message that another does something else leaves word of that, and breaks off, too: who waits
for it in an exchange of all of them hears it at once.

Several exchanges of a rank are under way at a time, in threads, and any may fail first. So its word names all of them.
Ranks that run the same have one of these in common: that to which the last of them came late.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from terrazzo.engine.instrumentation.label import NOT_THE_SAME, Label, places_text
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import default_store
from terrazzo.engine.runtime.process_groups import timeout_s_of
from terrazzo.errors import ConnectionLost, RanksApart, TimedOut, lost_a_rank, timed_out
from terrazzo.messages import of_ranks

__all__ = ["Exchange"]

_WORD_S = 2.0
"""How long a rank looks for the words of others; half of the group's own time, where that is shorter."""

_UNDER_WAY: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Label]] = weakref.WeakKeyDictionary()
"""What this rank has begun to exchange in a group and not ended, in order; what has failed stays."""
_numbers = itertools.count()


class Exchange:
    """An exchange in which all ranks of a group meet, from when this rank begins it; parts may be in other threads.

    Args:
        break_off: has the other ranks hear that nothing comes from here; called where they are asked for word.
    """

    def __init__(self, group: dist.ProcessGroup, label: Label, break_off: Callable[[], None]) -> None:
        self._group, self._label, self._break_off = group, label, break_off
        self._under_way, self._number = _UNDER_WAY.setdefault(group, {}), next(_numbers)
        self._under_way[self._number] = label

    @contextlib.contextmanager
    def part(self, *, last: bool = False) -> Iterator[None]:
        """Inside, others are waited for. The exchange has ended after the `last` part.

        Raises:
            RanksApart: where all ranks of the group have waited, and not for the same.
            TimedOut: where time is over otherwise.
            ConnectionLost: where another rank has ended or failed, and none has run out of time.
        """
        try:
            yield
        except BaseException as error:
            if (failed := self._explained(error)) is not None:
                raise failed from error
            del self._under_way[self._number]
            raise
        if last:
            del self._under_way[self._number]

    def _explained(self, error: BaseException) -> BaseException | None:
        """What to raise where it has failed with `error`; None if that is of anything else, or says all."""
        words = _Words(self._group)
        places = [_Waited(str(label), label.edit) for label in [*self._under_way.values()]]
        if isinstance(error, RanksApart):
            words.leave(_Word(places, str(error)))
            self._break_off()
            return None
        if not (timed_out(error) or lost_a_rank(error)):
            return None
        if timed_out(error) or words.any():
            words.leave(_Word(places))
            self._break_off()
            return _of_words(error, words.read(), words.ranks)
        why = str(error) if isinstance(error, ConnectionLost) else _ENDED
        return ConnectionLost(f"{why} Here it was the turn of {self._label}.")


class _Waited(NamedTuple):
    """Where a rank has waited, and what that asks for if the others are elsewhere."""

    name: str
    edit: str


class _Word(NamedTuple):
    """What a rank leaves for the others: where it has waited, the oldest first; `apart`: it has seen that others do
    something else, which is what its error says.
    """

    places: list[_Waited]
    apart: str = ""


def _of_words(error: BaseException, words: Mapping[int, _Word], ranks: Sequence[int]) -> TimedOut | RanksApart:
    """The error of ranks of which some have left word: one has seen that they are apart, or time is over."""
    for rank, word in sorted(words.items()):
        if word.apart:
            return RanksApart(f"Rank {rank} has come apart from another. Its message: {word.apart}")
    silent = [rank for rank in ranks if rank not in words]
    own, *others = [word.places for word in words.values()]
    shared = [place for place in own if all(place in places for places in others)]
    waited = {rank: (shared or word.places)[0] for rank, word in sorted(words.items())}
    where = places_text({rank: place.name for rank, place in waited.items()})
    if not (silent or shared):
        edits = " ".join(dict.fromkeys(place.edit for place in waited.values()))
        return RanksApart(
            f"{NOT_THE_SAME}, and have waited for each other until the time of their process group was over: {where}. "
            f"{edits}"
        )
    why = str(error) if isinstance(error, TimedOut) else f"{_NOT_COME if timed_out(error) else _LATE} {_IF_SLOW}"
    nowhere = f"; of {of_ranks(silent)} nothing is known" if silent else ""
    return TimedOut(f"{why} Waiting: {where}{nowhere}.")


_ENDED = "Another rank has ended or failed: see what it has printed."
_NOT_COME = "Other ranks have not come to an exchange in time: they may have ended, or run something else."
_LATE = "Another rank has waited in vain, for this rank or for others, until the time of their process group was over."
_IF_SLOW = "See what each has printed. Where one is only slow, give init_process_group a longer timeout."


class _Words:
    """What the ranks of a group had under way as one of them failed, as each has left word of it once; none where the
    store is gone, but this rank's own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._keys = {rank: f"terrazzo/waited/{group.group_name}/{rank}" for rank in self.ranks}
        self._own = _Word([])
        self._patience_s = min(_WORD_S, timeout_s_of(group, HOST) / 2)

    def any(self) -> bool:
        """Whether one has."""
        with contextlib.suppress(RuntimeError):
            return any(default_store().check([key]) for key in self._keys.values())
        return False

    def leave(self, word: _Word) -> None:
        """This rank's. Its first word stays: later ones know less of what it had begun."""
        self._own = word
        with contextlib.suppress(RuntimeError):
            default_store().compare_set(self._keys[dist.get_rank()], "", json.dumps(word))

    def read(self) -> dict[int, _Word]:
        """Of each rank whose word comes in time; no more are waited for where one says that they are apart."""
        words: dict[int, _Word] = {}
        until = time.monotonic() + self._patience_s
        with contextlib.suppress(RuntimeError):
            while len(words) < len(self.ranks) and time.monotonic() < until:
                for rank in (rank for rank in self.ranks if rank not in words):
                    if default_store().check([self._keys[rank]]):
                        places, apart = json.loads(default_store().get(self._keys[rank]))
                        words[rank] = _Word([_Waited(*each) for each in places], apart)
                if any(word.apart for word in words.values()):
                    break
                time.sleep(0.02)
        return {dist.get_rank(): self._own, **words}
