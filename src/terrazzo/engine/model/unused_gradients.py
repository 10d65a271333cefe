"""Backwards that no step uses: what is left of their gradients is a number for each unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.model.engine import Engine
from terrazzo.errors import Misuse

__all__ = ["UnusedGradients", "unused_gradients"]


class UnusedGradients:
    """Digests of gradients as this rank has computed them, before they are summed over ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._digests: dict[str, list[Tensor]] = {}

    def take(self, unit: int) -> None:
        """The gradients of a unit are complete: remember their digest, and forget them."""
        for bucket in self._engine.units[unit].trainable():
            if (data := bucket.gradient.drop()) is not None:
                self._digests.setdefault(self._engine.units[unit].title, []).append(digest(data))

    def digests(self) -> dict[str, list[int]]:
        """Digests by title of the unit, in the order in which gradients were complete; waits for the device."""
        return {title: torch.stack(each).tolist() for title, each in self._digests.items()}


@contextlib.contextmanager
def unused_gradients(engine: Engine) -> Iterator[UnusedGradients]:
    """Gradients of backwards inside go nowhere; no more than those of a few units are in memory at a time. Collective.

    Raises:
        Misuse: a step is under way, whose gradients these would be added to.
    """
    if any(bucket.gradient.exists for bucket in engine.trainable()):
        raise Misuse("Gradients that no step uses would be added to those of a step: call optimizer.zero_grad() first.")
    unused = UnusedGradients(engine)
    try:
        with engine.schedule.dropping(unused.take):
            yield unused
            for unit in engine.units:  # of gradients that have come late
                unused.take(unit.index)
    finally:
        engine.schedule.zero_grad()
