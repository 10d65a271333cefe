"""A ring buffer of events of 64 bytes in shared memory: what a rank did last, readable after the rank is gone.

Layout: a page of numbers, two slots for a table of names (JSON) of which one is valid at a time, then the events. A
reader may find an event half written: each has its sequence number twice, first and last, and counts if both agree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import BadInput
from terrazzo.processes.system import memory_file

__all__ = [
    "CAPACITY",
    "FIELDS",
    "LAST",
    "EventKind",
    "Flight",
    "FlightEvent",
    "Ring",
    "Tail",
    "now_ns",
    "pack",
    "read_flight",
]

CAPACITY = 1 << 15
"""Events in a ring: 2 MiB, enough for a few steps of a large model and many of a small one."""

FIELDS = {"rank", "world", "pid", "host", "boot", "units", "names", "tracks", "groups"}
"""Keys that every table has; it may have more."""

LAST = CAPACITY - 1
_BATCH = 128
"""Events that `Tail` reads at once."""

_MAGIC, _VERSION = b"TZFLIGHT", 1
_HEAD = struct.Struct("<8sIIQ")  # magic, version, bytes of an event, capacity
_PLACE = struct.Struct("<Q")  # of the valid table: its offset in the upper 32 bits, its length in the lower
_STEPS = struct.Struct("<Q")  # one more than the number of the newest step; 0 before the first
_PLACE_AT, _STEPS_AT, _PAGE, _TABLE_BYTES = 64, 128, 4096, 512 << 10
_EVENTS_AT = _PAGE + 2 * _TABLE_BYTES
_EVENT = struct.Struct("<QQQQQQIIBBBBHH")
pack, now_ns = _EVENT.pack_into, time.monotonic_ns
_DTYPE = np.dtype(
    [
        *[(name, "<u8") for name in ("time", "sequence", "ordinal", "since", "value", "live")],
        *[("unit", "<u4"), ("number", "<u4"), ("purpose", "u1"), ("kind", "u1"), ("track", "u1"), ("spare", "u1")],
        *[("micro", "<u2"), ("check", "<u2")],
    ]
)


class EventKind(IntEnum):
    """The kind of an event, which says what its fields mean."""

    ISSUED = 1
    DONE = 2
    WAITS = 3
    WAITED = 4
    PHASE = 5
    BEGINS = 6
    ENDS = 7
    MOVED = 8
    STEP = 9


ISSUED, DONE, WAITS, WAITED, PHASE, BEGINS, ENDS, MOVED, STEP = map(int, EventKind)
"""The same as plain ints, which are faster to pack and to compare."""


class FlightEvent(NamedTuple):
    """One event of a rank. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.

    Attributes:
        time: when it was written.
        sequence: its number among all events of the rank, from 1.
        ordinal: of an exchange, its number on its track; of a step, the step's number.
        since: when the span began that this event ends; 0 if it ends none.
        value: bytes sent (`ISSUED`), moved (`MOVED`) or resident (`STEP`); for `DONE`, when all ranks were there.
        live: bytes of transient memory.
        unit: index of the unit that is exchanged, or that runs.
        number: of the forward or backward pass that an exchange belongs to.
        purpose: of an exchange, as in its `Label`.
        kind: an `EventKind`.
        track: index in the table's `tracks` for exchanges, in its `names` for all other events.
        spare: unused.
        micro: forwards so far in this step.
        check: lower 16 bits of `sequence`.
    """

    time: int
    sequence: int
    ordinal: int
    since: int
    value: int
    live: int
    unit: int
    number: int
    purpose: int
    kind: int
    track: int
    spare: int
    micro: int
    check: int


class Ring:
    """The writing side: each event takes the place of the oldest one.

    Args:
        descriptor: of shared memory, as `Ring.memory` returns it.

    Attributes:
        next: returns the sequence number of a new event, whose place in `rows` is 64 × (number & LAST).
        rows: the events' memory. `write` shows how an event is packed; callers in a hurry do it themselves.
        micro: forwards so far in this step, which every event gets.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _EVENTS_AT + CAPACITY * _EVENT.size)
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, _EVENT.size, CAPACITY)
        self.next, self._place = itertools.count(1).__next__, 1
        self.rows = memoryview(self._memory)[_EVENTS_AT:]
        self.micro = 0

    @staticmethod
    def memory() -> int:
        """A file descriptor of new shared memory. Pages take room once they are written."""
        descriptor = memory_file("terrazzo-flight")
        os.ftruncate(descriptor, _EVENTS_AT + CAPACITY * _EVENT.size)
        return descriptor

    def describe(self, table: Mapping[str, Any]) -> None:
        """Write the table of names, in the place of the one before. One thread at a time may call this."""
        text = json.dumps(table).encode()
        if len(text) > _TABLE_BYTES:  # a model with so many units: they are shown by number
            text = json.dumps({**table, "units": []}).encode()
        self._place = 1 - self._place
        start = _PAGE + self._place * _TABLE_BYTES
        self._memory[start : start + len(text)] = text
        _PLACE.pack_into(self._memory, _PLACE_AT, start << 32 | len(text))

    def note_step(self, step: int) -> None:
        """Note the newest finished step outside of the ring, where no later event overwrites it."""
        _STEPS.pack_into(self._memory, _STEPS_AT, step + 1)

    def write(
        self,
        kind: int,
        track: int,
        numbers: tuple[int, int, int] = (0, 0, 0),
        live: int = 0,
        of: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Append an event with the present time. Any thread may call this.

        Args:
            numbers: its `ordinal`, `since` and `value`.
            of: its `unit`, `number` and `purpose`.
        """
        n = self.next()
        pack(self.rows, (n & LAST) * 64, now_ns(), n, *numbers, live, *of, kind, track, 0, self.micro, n & 0xFFFF)


class Flight(NamedTuple):
    """What one rank has recorded: the table of its ring, and its events, oldest first."""

    table: Mapping[str, Any]
    events: list[FlightEvent]

    def as_bytes(self) -> bytes:
        """The content of a file that `read_flight` reads."""
        text = json.dumps(self.table).encode()
        head = _HEAD.pack(_MAGIC, _VERSION, _EVENT.size, 0) + struct.pack("<I", len(text))
        return b"".join([head, text, *(_EVENT.pack(*event) for event in self.events)])


class Tail:
    """The reading side, while another process writes: returns each event once.

    Args:
        descriptor: of the ring's memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._seen = 0
        self._table: Mapping[str, Any] = {}

    @property
    def table(self) -> Mapping[str, Any]:
        """The newest table that can be read; empty before the first."""
        for _ in range(3):  # the writer may replace it while it is read
            (place,) = _PLACE.unpack_from(self._memory, _PLACE_AT)
            text = self._memory[place >> 32 : (place >> 32) + (place & 0xFFFFFFFF)]
            with contextlib.suppress(ValueError):
                self._table = dict(json.loads(text)) if text else {}
                break
        return self._table

    @property
    def step(self) -> int | None:
        """The newest finished step, even if its event has been overwritten; None before the first."""
        (steps,) = _STEPS.unpack_from(self._memory, _STEPS_AT)
        return int(steps) - 1 if steps else None

    def new(self) -> list[FlightEvent]:
        """Events since the last call that have not been overwritten, oldest first.

        Empty as long as there is no table, which says what their fields mean; a later call returns them.
        """
        if not (self._table or self.table):
            return []
        events: list[FlightEvent] = []
        while batch := self._run(self._seen + 1):
            events += batch
            self._seen = batch[-1].sequence
        if self._at(self._seen + 1).sequence > self._seen + 1:  # the writer has lapped this reader
            events += [each for each in _whole(self._memory[_EVENTS_AT:]) if each.sequence > self._seen]
            self._seen = events[-1].sequence if events else self._seen
        return events

    def flight(self) -> Flight:
        """The table and all events that are there now."""
        return Flight(self.table, _whole(self._memory[_EVENTS_AT:]))

    def _run(self, first: int) -> list[FlightEvent]:
        """Consecutive whole events from number `first` on, as far as one batch goes; call again for more."""
        place = first % CAPACITY
        start, count = _EVENTS_AT + place * 64, min(_BATCH, CAPACITY - place)
        events = []
        for sequence, values in enumerate(_EVENT.iter_unpack(self._memory[start : start + count * 64]), first):
            if values[1] != sequence or values[-1] != sequence & 0xFFFF:
                break
            events.append(FlightEvent._make(values))
        return events

    def _at(self, sequence: int) -> FlightEvent:
        event = FlightEvent._make(_EVENT.unpack_from(self._memory, _EVENTS_AT + sequence % CAPACITY * 64))
        return event if event.check == event.sequence & 0xFFFF else event._replace(sequence=0)


def read_flight(path: Path) -> Flight:
    """A rank's flight, from a saved file or from the memory that the rank writes to.

    Raises:
        BadInput: the file is something else, or damaged.
        OSError: it is gone.
    """
    if not path.is_file():  # a descriptor that was a ring's memory may be a pipe by now
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        magic, version, size, capacity = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
        if (magic, version, size) == (_MAGIC, _VERSION, _EVENT.size):
            if capacity:
                return Tail(file.fileno()).flight()
            with contextlib.suppress(ValueError, struct.error):
                (length,) = struct.unpack("<I", file.read(4))
                table = json.loads(file.read(length))
                if isinstance(table, dict) and table.keys() >= FIELDS:
                    return Flight(table, _whole(file.read()))
        raise BadInput(f"'{path}' is damaged, or not a flight record of this version of Terrazzo: remove it.")


def _whole(data: bytes) -> list[FlightEvent]:
    """Events that are not torn, oldest first."""
    rows = np.frombuffer(data[: len(data) // _EVENT.size * _EVENT.size], _DTYPE)
    rows = rows[rows["purpose"] <= max(Purpose)]
    rows = rows[(rows["sequence"] > 0) & (rows["sequence"] & 0xFFFF == rows["check"])]
    return [FlightEvent._make(row) for row in rows[np.argsort(rows["sequence"])].tolist()]
