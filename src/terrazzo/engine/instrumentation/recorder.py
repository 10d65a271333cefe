"""What the engine reports to as it runs, such as a flight recorder. The engine itself writes nothing down."""

from __future__ import annotations

from typing import Literal

from terrazzo.engine.labels.label import Label

__all__ = ["SILENT", "Doing", "Recorder"]

Doing = Literal["forward", "recompute", "backward"]
"""What a unit does; `recompute` is its forward, run again inside of backward."""


class Recorder:
    """Hears of exchanges, waits, phases, units and moves between tiers; this one does nothing with it.

    A track is all exchanges of one kind along one axis. Their ordinals count from 1 on each rank, and ranks of an axis
    issue them in the same order. Moments are of `time.perf_counter()`, in seconds.

    Methods are called by whichever thread does what they tell of. They must not wait, raise or exchange anything.
    """

    def track(self, axis: str, kind: str, activations: bool) -> int:
        """A number for a track, which it is called by from now on.

        Args:
            axis: of the mesh; empty where all ranks exchange.
            activations: whether modules exchange, and not the engine.
        """
        return 0

    def issued(self, track: int, ordinal: int, label: Label, sent_bytes: int) -> None:
        """An exchange has been asked for; `sent_bytes` are this rank's."""

    def done(self, track: int, ordinal: int, begun: float, ready: float | None) -> None:
        """An exchange has ended now; all other ranks were there at `ready`, if that is known."""

    def waits(self, track: int, ordinal: int) -> None:
        """The host begins to wait for an exchange."""

    def waited(self, track: int, ordinal: int, since: float) -> None:
        """The host has waited for it."""

    def phase(self, name: str) -> None:
        """A phase of the training loop begins, and the one before ends."""

    def unit_begins(self, index: int, doing: Doing) -> None:
        """The weights of a unit are here, and it runs."""

    def unit_ends(self, index: int) -> None:
        """A unit has run forward, or again in backward; nobody tells that its backward has ended."""

    def moved(self, what: str, since: float, moved_bytes: int) -> None:
        """States have been moved between tiers, or updated away from the device."""


SILENT = Recorder()
