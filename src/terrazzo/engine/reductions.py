"""Sums of gradients that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from terrazzo.engine.links.transfer import Transfer

__all__ = ["Reductions"]


class Reductions:
    """Of several units, oldest first."""

    def __init__(self) -> None:
        self._transfers: list[tuple[int, Transfer]] = []

    @property
    def under_way(self) -> bool:
        return bool(self._transfers)

    def start(self, unit: int, transfer: Transfer) -> None:
        self._transfers.append((unit, transfer))

    def advance(self) -> Iterator[int]:
        """Start each one's next collective; gives the units whose gradients are summed."""
        for unit, transfer in self._transfers:
            transfer.advance()
            if transfer.done:
                yield unit
        self._transfers = [(unit, transfer) for unit, transfer in self._transfers if not transfer.done]

    def finish(self) -> Iterator[int]:
        """Wait for all; gives each unit when its gradients are summed."""
        for unit, transfer in self._transfers:
            transfer.finish()
            yield unit
        self._transfers.clear()

    def abandon(self) -> None:
        """Wait for what still comes to its end, and tell nobody."""
        for _, transfer in self._transfers:
            with contextlib.suppress(RuntimeError, OSError):
                transfer.finish()
        self._transfers.clear()
