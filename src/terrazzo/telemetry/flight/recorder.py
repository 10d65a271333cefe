"""`RingRecorder`: writes what the engine reports into a ring, as events of 64 bytes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from terrazzo.engine import Engine
from terrazzo.engine.instrumentation.recorder import SILENT, Doing, Recorder
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.labels.label import Label
from terrazzo.processes.system import boot_id
from terrazzo.telemetry.flight.ring import (
    BEGINS,
    DONE,
    ENDS,
    ISSUED,
    LAST,
    MOVED,
    PHASE,
    STEP,
    WAITED,
    WAITS,
    Ring,
    now_ns,
    pack,
)
from terrazzo.telemetry.steps.memory import resident_bytes

__all__ = ["RingRecorder"]

_TRACK_WITHOUT_NAME = 255
"""The number that all tracks after the first 255 share: an event has one byte for it."""

_16 = 0xFFFF
_RESIDENT_NS = 10**9
"""Resident bytes are read at most this often: asking the system takes a hundred times as long as an event."""


class RingRecorder(Recorder):
    """Writes an event for each call, and never waits.

    An event takes 1 µs in a loop, and 10 µs after a matrix product, which has filled the caches. So methods that are
    called often pack their event themselves: one call less halves that.

    Args:
        ring: to write to.
        rank: of this process, of `world` ranks.
    """

    def __init__(self, ring: Ring, rank: int, world: int) -> None:
        self._ring, self._ledger, self._write = ring, Ledger(), ring.write
        self._next, self._rows = ring.next, ring.rows
        self._resident, self._resident_at = 0, -_RESIDENT_NS
        self._numbers: dict[str, int] = {}
        self._describing = threading.RLock()  # re-entrant: a finalizer that records may run while it is held
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
        """Record what this engine does from now on.

        Args:
            more: entries for the ring's table, such as the folder of the run.
        """
        axes = engine.axes
        groups = {axis: dist.get_process_group_ranks(axes.along(axis).group) for axis in axes.within_replica}
        if axes.has_experts:
            groups |= {axis: dist.get_process_group_ranks(axes.along(axis).group) for axis in ("edp", "ep")}
        self.extend_table(units=[unit.name for unit in engine.units], groups=self._table["groups"] | groups, **more)
        self._ledger = engine.tally.ledger
        engine.tally.set_recorder(self)
        engine.store.set_recorder(self)

    @staticmethod
    def leave(engine: Engine) -> None:
        """Have nothing recorded of what this engine does from now on."""
        engine.tally.set_recorder(SILENT)
        engine.store.set_recorder(SILENT)

    def extend_table(self, **more: Any) -> None:
        """Add entries to the ring's table. Any thread may call this."""
        with self._describing:
            self._table |= more
            self._ring.describe(self._table)

    @property
    def table(self) -> Mapping[str, Any]:
        return self._table

    def step_done(self, step: int) -> None:
        """A step of the training loop has ended."""
        if (now := now_ns()) - self._resident_at >= _RESIDENT_NS:
            self._resident, self._resident_at = resident_bytes() or 0, now
        self._write(STEP, 0, (step, 0, self._resident), self._ledger.live_bytes)
        self._ring.note_step(step)
        self._ring.micro = 0

    # -- what the engine reports ------------------------------------------------------------------------------------

    def track(self, axis: str, kind: str, activations: bool) -> int:
        tracks, wanted = self._table["tracks"], [axis, kind, activations]
        if wanted not in tracks:
            with self._describing:
                tracks = self._table["tracks"]
                if wanted not in tracks:  # another thread has not added it meanwhile
                    if len(tracks) == _TRACK_WITHOUT_NAME:
                        return _TRACK_WITHOUT_NAME
                    tracks = [*tracks, wanted]
                    self.extend_table(tracks=tracks)
        return int(tracks.index(wanted))

    def issued(self, track: int, ordinal: int, label: Label, sent_bytes: int) -> None:
        n, live, micro = self._next(), self._ledger.live_bytes, self._ring.micro
        unit, of, why, at = label.index, label.number & 0xFFFFFFFF, label.purpose, (n & LAST) * 64
        pack(self._rows, at, now_ns(), n, ordinal, 0, sent_bytes, live, unit, of, why, ISSUED, track, 0, micro, n & _16)

    def done(self, track: int, ordinal: int, begun: float, ready: float | None) -> None:
        n, live, micro = self._next(), self._ledger.live_bytes, self._ring.micro
        since, there, at = int(begun * 1e9), int((ready or 0) * 1e9), (n & LAST) * 64
        pack(self._rows, at, now_ns(), n, ordinal, since, there, live, 0, 0, 0, DONE, track, 0, micro, n & _16)

    def waits(self, track: int, ordinal: int) -> None:
        n, micro = self._next(), self._ring.micro
        pack(self._rows, (n & LAST) * 64, now_ns(), n, ordinal, 0, 0, 0, 0, 0, 0, WAITS, track, 0, micro, n & _16)

    def waited(self, track: int, ordinal: int, since: float) -> None:
        n, micro, begun = self._next(), self._ring.micro, int(since * 1e9)
        pack(self._rows, (n & LAST) * 64, now_ns(), n, ordinal, begun, 0, 0, 0, 0, 0, WAITED, track, 0, micro, n & _16)

    def phase(self, name: str) -> None:
        if name == "forward":
            self._ring.micro = min(self._ring.micro + 1, _16)
        number = self._numbers.get(name)
        number = self._named(name) if number is None else number
        n, micro = self._next(), self._ring.micro
        pack(self._rows, (n & LAST) * 64, now_ns(), n, 0, 0, 0, 0, 0, 0, 0, PHASE, number, 0, micro, n & _16)

    def unit_begins(self, index: int, doing: Doing) -> None:
        name = self._numbers.get(doing)
        name = self._named(doing) if name is None else name
        n, live, micro = self._next(), self._ledger.live_bytes, self._ring.micro
        pack(self._rows, (n & LAST) * 64, now_ns(), n, 0, 0, 0, live, index, 0, 0, BEGINS, name, 0, micro, n & _16)

    def unit_ends(self, index: int) -> None:
        n, live, micro = self._next(), self._ledger.live_bytes, self._ring.micro
        pack(self._rows, (n & LAST) * 64, now_ns(), n, 0, 0, 0, live, index, 0, 0, ENDS, 0, 0, micro, n & _16)

    def moved(self, what: str, since: float, moved_bytes: int) -> None:
        self._write(MOVED, self._named(what), (0, int(since * 1e9), moved_bytes))

    def _named(self, name: str) -> int:
        if (number := self._numbers.get(name)) is None:
            with self._describing:
                number = self._numbers.setdefault(name, len(self._numbers))
                self.extend_table(names=list(self._numbers))
        return number
