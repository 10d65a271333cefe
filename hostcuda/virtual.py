"""Virtual time: what a program would take if kernels, copies and collectives took what these speeds say.

A product of matrices takes its FLOPs, every other kernel the bytes that it reads and writes, a copy the bytes that
cross PCIe, and a collective what a ring takes (`Links`), from when the last of its ranks has come to it. A message
comes no earlier than it was sent. Nothing else takes time: no Python, no work of the host, no messages of hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from hostcuda.lanes import LINKS, LISTENERS, Carried, Links
from hostcuda.library import native

__all__ = [
    "LINKS",
    "Carried",
    "Links",
    "Span",
    "listening",
    "now_s",
    "queued_s",
    "set_speeds",
    "spent_s",
    "tracing",
]


def set_speeds(flops: float = 4e14, memory: float = 2e12, pcie: float = 2.5e10, launch_s: float = 0.0) -> None:
    """Speeds from now on. Those of collectives are `LINKS`.

    Args:
        flops: FLOP per second of matrix products.
        memory: bytes per second of every other kernel.
        pcie: bytes per second of copies from and to the host.
        launch_s: seconds that a launch costs the host.
    """
    native.set_speeds(flops, memory, pcie, launch_s)


def now_s() -> float:
    """Seconds by which all is over that this thread has done or waited for."""
    return float(native.host_time_s())


def queued_s() -> float:
    """Seconds by which all is over that the current stream has been given, and what that waits for."""
    event = torch.cuda.Event()
    event.record()
    return float(native.event_time_s(event.event_id))


_KINDS = ("kernels", "kernels beside", "copies in", "copies out")


def spent_s() -> dict[str, float]:
    """Seconds of all work that this process's device has been given so far: `kernels` on the default stream and
    `kernels beside` it, `copies in` (from the host) and `copies out`. Collectives are told to whoever listens.
    """
    return {kind: float(native.spent_s(number)) for number, kind in enumerate(_KINDS)}


@contextlib.contextmanager
def listening() -> Iterator[list[Carried]]:
    """The collectives that this process begins inside, in any thread, in their order."""
    heard: list[Carried] = []
    LISTENERS.append(heard)
    try:
        yield heard
    finally:
        LISTENERS[:] = [listener for listener in LISTENERS if listener is not heard]


class Span(NamedTuple):
    """Work of a kind that `spent_s` knows, or a collective by its name; on the default stream, or `beside` it.

    A collective lasts from when this rank has come to it: what it waits for others is in it.
    """

    what: str
    beside: bool
    begin_s: float
    end_s: float


class _Row(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("beside", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("begin_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
    )


@contextlib.contextmanager
def tracing() -> Iterator[list[Span]]:
    """All work that begins inside, told once that has ended. Kernels that follow one another may be one span."""
    traced: list[Span] = []
    with listening() as heard:
        native.record_spans(1)
        try:
            yield traced
        finally:
            native.record_spans(0)
    rows = (_Row * native.span_count())()
    native.spans(rows, len(rows))
    names = iter([each.name for each in heard])
    for row in rows:
        what = _KINDS[row.kind] if row.kind < len(_KINDS) else next(names)
        traced.append(Span(what, bool(row.beside), row.begin_s, row.end_s))
