"""Detects memory that changes by itself between two updates, unit by unit, also without copies on other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from terrazzo.engine import UnitSnapshot, engine_of
from terrazzo.errors import CopiesDiffer, Corrupted
from terrazzo.exchange import gather_json
from terrazzo.messages import counted, listed
from terrazzo.train.session.session import Session
from terrazzo.train.settings.intervals import is_due

__all__ = ["MemoryChecks"]


class MemoryChecks:
    """Compares one unit's states after an update and before the next, and its gathered weights between ranks.

    Args:
        every: steps between two units; None for no checks.

    Attributes:
        rotation: steps until all units of all stages have been checked, as the newest check has found.
    """

    def __init__(self, session: Session, every: int | None) -> None:
        self._session, self._every = session, every
        self._engine = engine_of(session.model)
        self.rotation = (every or 0) * len(self._engine.units)
        self._snapshot: UnitSnapshot | None = None

    def begin(self) -> None:
        """A step begins: take a snapshot, if one is due."""
        step = self._session.step + 1
        self._snapshot = None
        if self._every is not None and is_due(self._session.config.plan, step, self._every):
            self._snapshot = UnitSnapshot(self._engine, step // self._every % len(self._engine.units))

    @property
    def due(self) -> bool:
        return self._snapshot is not None

    def check(self) -> None:
        """Compare with the snapshot, before this step's update. Collective.

        Raises:
            Corrupted: on all ranks, if a state has changed, or ranks have computed with different weights.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        of_ranks = gather_json([snapshot.changed(), snapshot.gathered(), len(self._engine.units)])
        self.rotation = (self._every or 0) * max(units for *_, units in of_ranks)
        changed = {rank: names for rank, (names, *_) in enumerate(of_ranks) if names}
        step = self._session.step + 1
        if changed:
            what = "; ".join(f"of rank {rank}: {listed(names)}" for rank, names in changed.items())
            raise Corrupted(
                f"Memory has changed by itself between the updates of steps {step - 1} and {step}, in {snapshot.title},"
                f" {what}."
            )
        if (others := _others([gathered for _, gathered, _ in of_ranks])) is not None:
            ranks, most = others
            plural = "s" if len(ranks) > 1 else ""
            than = counted(most, "other rank") if most else "each other"
            raise CopiesDiffer(
                f"In step {step} rank{plural} {listed(ranks, 8)} computed with other weights of {snapshot.title} than"
                f" {than}, though all had gathered the same: memory, or the way between ranks, has changed them."
            )


def _others(gathered: Sequence[Sequence[Any]]) -> tuple[list[int], int] | None:
    """Ranks whose gathered weights differ from the majority's, and the size of that; 0 without a majority.

    Args:
        gathered: by rank, what `UnitSnapshot.gathered` has returned there.
    """
    groups: dict[tuple[int, str], dict[int, int]] = {}
    for rank, buckets in enumerate(gathered):
        for number, (coordinates, total) in enumerate(buckets):
            groups.setdefault((number, str(coordinates)), {})[rank] = total
    for sums in groups.values():
        counts = Counter(sums.values())
        if len(counts) > 1:
            usual, most = counts.most_common(1)[0]
            if 2 * most > len(sums):
                return [rank for rank, total in sums.items() if total != usual], most
            return list(sums), 0
    return None
