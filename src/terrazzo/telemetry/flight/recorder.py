"""What the engine tells, written into a ring."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from terrazzo.engine import Engine
from terrazzo.engine.links.label import Label
from terrazzo.engine.links.recorder import Doing, Recorder
from terrazzo.engine.links.traffic import Ledger
from terrazzo.engine.runtime.system import boot_id
from terrazzo.telemetry.flight.ring import Ring, What
from terrazzo.telemetry.memory import resident_bytes

__all__ = ["Recorded"]

_MOST_TRACKS = 255
ISSUED, DONE, WAITS, WAITED, PHASE, BEGINS, ENDS, MOVED, STEP = map(int, What)  # plain ones are packed sooner


class Recorded(Recorder):
    """Writes a record of each event: some 1 µs of computing, and nothing that waits.

    Args:
        ring: where to.
        rank: of this process, among `world`.
    """

    def __init__(self, ring: Ring, rank: int, world: int) -> None:
        self._ring, self._ledger, self._write = ring, Ledger(), ring.write
        self._numbers: dict[str, int] = {}
        self._table: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "units": [],
            "names": [],
            "tracks": [],
            "groups": {"": list(range(world))},
        }
        ring.describe(self._table)

    def follow(self, engine: Engine, **more: Any) -> None:
        """Hear of all that this engine does from now on.

        Args:
            more: for the table, such as the folder of the run.
        """
        axes = engine.axes
        groups = {axis: dist.get_process_group_ranks(axes.along(axis).group) for axis in axes.with_stages}
        if axes.has_experts:
            groups |= {axis: dist.get_process_group_ranks(axes.along(axis).group) for axis in ("edp", "ep")}
        self.tell(units=[unit.name for unit in engine.units], groups=self._table["groups"] | groups, **more)
        self._ledger = engine.tally.ledger
        engine.tally.tell(self)
        engine.store.tell(self)

    def tell(self, **more: Any) -> None:
        """Put these into the table."""
        self._table |= more
        self._ring.describe(self._table)

    @property
    def table(self) -> Mapping[str, Any]:
        return self._table

    def step_done(self, step: int) -> None:
        """A step of the training loop has ended."""
        self._write(STEP, 0, (step, 0, resident_bytes() or 0), self._ledger.live_bytes)
        self._ring.micro = 0

    # -- what the engine tells -------------------------------------------------------------------------------------

    def track(self, axis: str, kind: str, activations: bool) -> int:
        tracks, wanted = self._table["tracks"], [axis, kind, activations]
        if wanted not in tracks:
            if len(tracks) == _MOST_TRACKS:
                return _MOST_TRACKS  # has no name
            tracks.append(wanted)
            self._ring.describe(self._table)
        return int(tracks.index(wanted))

    def issued(self, track: int, ordinal: int, label: Label, sent_bytes: int) -> None:
        of = (label.unit, label.number & 0xFFFFFFFF, label.purpose)
        self._write(ISSUED, track, (ordinal, 0, sent_bytes), self._ledger.live_bytes, of)

    def done(self, track: int, ordinal: int, begun: float, ready: float | None) -> None:
        self._write(DONE, track, (ordinal, int(begun * 1e9), int((ready or 0) * 1e9)), self._ledger.live_bytes)

    def waits(self, track: int, ordinal: int) -> None:
        self._write(WAITS, track, (ordinal, 0, 0))

    def waited(self, track: int, ordinal: int, since: float) -> None:
        self._write(WAITED, track, (ordinal, int(since * 1e9), 0))

    def phase(self, name: str) -> None:
        if name == "forward":
            self._ring.micro = min(self._ring.micro + 1, 0xFFFF)
        self._write(PHASE, self._named(name))

    def unit_begins(self, index: int, doing: Doing) -> None:
        self._write(BEGINS, self._named(doing), (0, 0, 0), self._ledger.live_bytes, (index, 0, 0))

    def unit_ends(self, index: int) -> None:
        self._write(ENDS, 0, (0, 0, 0), self._ledger.live_bytes, (index, 0, 0))

    def moved(self, what: str, since: float, moved_bytes: int) -> None:
        self._write(MOVED, self._named(what), (0, int(since * 1e9), moved_bytes))

    def _named(self, name: str) -> int:
        if (number := self._numbers.get(name)) is None:
            number = self._numbers[name] = len(self._numbers)
            self.tell(names=list(self._numbers))
        return number
