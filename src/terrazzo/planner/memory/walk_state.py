"""What a walk through a step knows: what is held now, the fullest moment so far, and what is here of each unit."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.planner.memory.step_settings import HELD_KINDS, StepUnit
from terrazzo.planner.memory.unit_events import Change

__all__ = ["AT_LOSS", "FullestMoment", "WalkedUnit"]

AT_LOSS = "at the loss"
"""A moment, in words."""


class FullestMoment:
    """Counts what is held, and keeps the moment at which it was the most; and what it may be at most, at any moment.

    The moment that is fullest as expected need not be the one that may become the fullest.

    Attributes:
        now: bytes by `HELD_KINDS`, and their `total`; `upper`: what they may take, by `shares` of each kind.
        best, best_total: the same at the fullest moment, which is `moment` in words.
        best_upper: the most that `upper` has been.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.best, self.best_total, self.moment = [0.0] * len(HELD_KINDS), -1.0, "at rest"
        self.shares, self.best_upper = shares, 0.0
        self.empty()

    def empty(self) -> None:
        """Nothing is held."""
        self.now, self.total, self.upper = [0.0] * len(HELD_KINDS), 0.0, 0.0

    def apply(self, change: Change, moment: str) -> None:
        """Take note of all that happens at a moment; the most in between counts."""
        total, now, upper, shares = self.total, self.now, self.upper, self.shares
        risen = upper
        for kind, count_bytes in change.at_rise:
            risen += count_bytes * shares[kind]
        if risen > self.best_upper:
            self.best_upper = risen
        if total + change.rise > self.best_total:
            self.best, self.best_total, self.moment = list(now), total + change.rise, moment
            for kind, count_bytes in change.at_rise:
                self.best[kind] += count_bytes
        for kind, count_bytes in change.change:
            now[kind] += count_bytes
            upper += count_bytes * shares[kind]
        self.total, self.upper = total + change.net, upper

    def add(self, kind: int, count_bytes: float) -> None:
        """Add bytes of a kind, or take off where they are negative; `note` says when it counts."""
        self.now[kind] += count_bytes
        self.total += count_bytes
        self.upper += count_bytes * self.shares[kind]

    def note(self, moment: str, upper_extra: float = 0.0) -> None:
        """Whether this is the fullest moment so far, or what may be that, with what it alone may take more."""
        if self.upper + upper_extra > self.best_upper:
            self.best_upper = self.upper + upper_extra
        if self.total > self.best_total:
            self.best, self.best_total, self.moment = list(self.now), self.total, moment

    def bring(self, unit: WalkedUnit, one_part: bool = False) -> None:
        """What is still to come of the gather of its weights, or a part of that."""
        coming = unit.arriving[:1] if one_part else unit.arriving
        unit.arriving = unit.arriving[len(coming) :]
        for change in coming:
            self.apply(change, "while gathering weights")

    def note_beside(self, kind: int, count_bytes: float, moment: str) -> None:
        """Note the moment with `count_bytes` more, which go again."""
        self.add(kind, count_bytes)
        self.note(moment)
        self.add(kind, -count_bytes)


class WalkedUnit:
    """A unit of the row, and what a rank has of it at a moment of the walk.

    Attributes:
        events, count, saved, working, chunk, forward_only: as of `StepUnit`. `others`: the units that it stands for
            beside itself.
        is_here: full weights are, or are on their way.
        was_here: they have been gathered in this pass, so that what `between` keeps of them is there.
        rests: they have been put down, to be gathered again.
        arriving: what is still to come of the gather of its weights.
        is_updating: an update away from the device runs on, whose new weights come with the next gather.
        has_pending: there is an unreduced gradient. `only_adds`: one that has been added up over micro-batches.
        has_partial: there is a sum of earlier micro-batches.
        row_between, row_sums: bytes that the units which it stands for keep between forward and backward, and of sums.
    """

    __slots__ = (
        *("events", "count", "others", "saved", "working", "chunk", "forward_only"),
        *("is_here", "was_here", "rests", "arriving", "is_updating", "has_pending", "only_adds", "has_partial"),
        *("row_between", "row_sums"),
    )

    def __init__(self, unit: StepUnit) -> None:
        self.events, self.count, self.saved, self.working = unit.events, unit.count, unit.saved, unit.working
        self.chunk, self.forward_only, self.others = unit.chunk, unit.forward_only, unit.count - 1
        self.restart()

    def restart(self) -> None:
        """Nothing is there but weights at rest."""
        self.is_here = self.was_here = self.rests = self.is_updating = False
        self.arriving: tuple[Change, ...] = ()
        self.has_pending = self.only_adds = self.has_partial = False
        self.row_between = self.row_sums = 0
