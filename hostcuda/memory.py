"""What happens to the device's memory, recorded, and what CUDA's caching allocator would make of it.

A rank records its own device. What was allocated before the recording began is not in it: begin before the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hostcuda.caching import Event
from hostcuda.library import native

__all__ = ["begin", "count", "end", "events"]

_KINDS = ("allocate", "free", "record", "reached")


def begin() -> None:
    """Record from now on; what was recorded before is forgotten."""
    native.record_events(1)


def end() -> None:
    """Record no longer. What has been recorded stays."""
    native.record_events(0)


def count() -> int:
    """Events so far: a mark to cut them at."""
    return int(native.event_count())


def events() -> Sequence[Event]:
    """In order. What is done to memory that was allocated before the recording began is left out."""
    rows = (ctypes.c_int64 * 4 * count())()
    native.events(rows, len(rows))
    known: set[int] = set()
    found = []
    for kind, block, size, stream in rows:
        name = _KINDS[kind]
        if name == "allocate":
            known.add(block)
        if name == "reached" or block in known:
            found.append(Event(name, block, size, stream))
    return found
