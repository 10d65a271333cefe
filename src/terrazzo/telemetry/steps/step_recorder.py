"""The record of a step: where its time went, by phase and by cause, what was exchanged, and what memory held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from terrazzo.engine import Engine
from terrazzo.engine.comm.counts.times import Times
from terrazzo.engine.runtime import device as devices
from terrazzo.telemetry.steps.memory import PeakMemory

__all__ = [
    "CAUSE_OF_KIND",
    "PHASES",
    "TIME_CAUSES",
    "StepRecorder",
    "StepTimes",
    "causes_of",
    "compared_seconds",
    "exchange_seconds",
    "time_fields",
]

PHASES = ("input", "forward", "backward", "clip", "update", "evaluate", "save", "other")
"""The phases of a step, in their order. Each moment belongs to one."""

TIME_CAUSES = ("compute", "gather", "reduce", "exchange", "late_peer", "tier", "update", "input", "evaluate", "save")
"""What the host did, or waited for. Each moment belongs to one."""

_APART = ("update", "input", "evaluate", "save")
"""Phases that are causes themselves, but for what the host waited in them."""

CAUSE_OF_KIND = {"all_gather": "gather", "broadcast": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
CAUSE_OF_KIND |= {"update": "tier", "control": "late_peer"}
"""By kind of exchange, of weights and gradients; those of activations are cause `exchange`, but for `control`."""

_Exchanges = defaultdict[tuple[str, str], Times]
"""By axis and kind."""


class StepTimes(NamedTuple):
    """What steps took: seconds by phase, of which waited, and exchanges by axis and kind.

    Exchanges of activations have the axis along which they go, and count as cause `exchange`.
    """

    seconds: Mapping[str, float]
    waited: Mapping[str, float]
    data: Mapping[tuple[str, str], Times]
    activations: Mapping[tuple[str, str], Times]


def causes_of(spent: StepTimes) -> dict[str, float]:
    """Seconds by cause: they add up to those of all phases.

    A wait is `late_peer` while not all other ranks were there, and the exchange's own after that. `compute` is what is
    left: arithmetic on a CPU, and the engine's and the loop's own work.
    """
    causes = dict.fromkeys(TIME_CAUSES, 0.0)
    for phase, seconds in spent.seconds.items():
        causes[phase if phase in _APART else "compute"] += seconds - spent.waited[phase]
    groups = ((spent.data, CAUSE_OF_KIND), (spent.activations, {"control": "late_peer"}))
    for exchanges, cause_of in groups:
        for (_, kind), times in exchanges.items():
            causes["late_peer"] += times.late_s
            causes[cause_of.get(kind, "exchange")] += times.exposed_s - times.late_s
    return causes


def time_fields(spent: StepTimes, steps: int, on_cuda: bool) -> dict[str, Any]:
    """The fields of a record that say where the time of so many steps went, in the mean.

    On CUDA the device waits, and the host does not know for what: such a record has no causes.
    """
    count = max(1, steps)
    fields: dict[str, Any] = {"v": 1, "steps": steps, "step_s": sum(spent.seconds.values()) / count}
    fields["clock"] = "host" if on_cuda else "all"
    fields["phase_s"] = {name: seconds / count for name, seconds in spent.seconds.items()}
    if not on_cuda:
        fields["cause_s"] = {name: seconds / count for name, seconds in causes_of(spent).items()}
    return fields


def compared_seconds(spent: StepTimes, steps: int, on_cuda: bool) -> dict[str, float]:
    """What ranks compare of their own steps, by the names of a record's `skew`: seconds in the mean."""
    causes = causes_of(spent) | {"step": sum(spent.seconds.values())}
    names = ("input",) if on_cuda else ("step", "late_peer", "compute", "input")
    return {f"{name}_s": causes[name] / max(1, steps) for name in names}


def exchange_seconds(times: Times, steps: int) -> dict[str, float]:
    """The seconds of a row of a record's `comm`."""
    seconds = {"total_s": times.total_s, "exposed_s": times.exposed_s, "late_s": times.late_s}
    return {name: value / steps for name, value in seconds.items()}


class StepRecorder:
    """Takes the engine's counts at the end of each step, and makes one record of all steps since the last one.

    Args:
        engine: of the model; nothing of it is kept alive.
        micro_batches: in a step, on this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int = 1) -> None:
        self._tally, self._device = engine.tally, engine.axes.device
        self._on_cuda, self._peak = devices.is_cuda(self._device), PeakMemory(self._device)
        bill = engine.promise.memory(micro_batches)
        sent = engine.promise.traffic(micro_batches, ends_round=True).by_name()
        self._at_rest = {
            "weight": bill.weight_bytes,
            "master": bill.master_bytes,
            "grad": bill.grad_bytes,
            "moments": bill.moments_bytes,
        }
        self._promised = {
            "sent_bytes": {kind: count for kind, count in sent.items() if kind != "control"},
            "transient": bill.transient_bytes,
        }
        self._clear()
        self.begin()

    def begin(self) -> None:
        """Forget what has been counted so far."""
        self.take()
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._seconds, self._waited = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self._data: _Exchanges = defaultdict(Times)
        self._activations: _Exchanges = defaultdict(Times)

    def step_done(self) -> None:
        """A step has ended, and with it what is counted of it."""
        self._steps += 1
        self.take()

    def take(self) -> None:
        """Take what has been counted so far; behind a step, as a save has, it counts for that step."""
        traffic = self._tally.traffic
        _move(traffic.times, self._data)
        for axis, along in traffic.along.items():
            _move(along.times, self._activations, axis)
        for taken, into in zip(self._tally.phases.drain(), (self._seconds, self._waited), strict=True):
            for phase, seconds in taken.items():
                into[phase] += seconds

    def numbers(self) -> list[float]:
        """This rank's part of what is compared between ranks: see `skew`."""
        return [*self._compared.values(), float(self._peak.peak_bytes)]

    def skew(self, rows: Iterable[Iterable[float]]) -> dict[str, list[float]]:
        """What is compared, by name, in rank order: the rank that all wait for has the least `late_peer_s`."""
        names = (*self._compared, "peak_bytes")
        return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    def record(self) -> dict[str, Any]:
        """The mean of all steps since the last call; `docs/concepts/step-record.md` has every field."""
        steps, spent = max(1, self._steps), self._spent
        record = time_fields(spent, self._steps, self._on_cuda)
        record["comm"] = {
            f"{axis} {kind}".strip(): self._exchanged(times, steps)
            for (axis, kind), times in sorted(_together(spent.data, spent.activations).items())
            if kind != "update" and times.count
        }
        record["memory_bytes"] = self._memory()
        record["promised"] = self._promised
        self._clear()
        return record

    def _memory(self) -> dict[str, int]:
        """Bytes by state. What a CPU rank has beside these is not split up: libraries and malloc keep some of it."""
        by_state = self._at_rest | {"transient": self._tally.ledger.peak_bytes}
        peak = self._peak.peak_bytes
        if not self._on_cuda:
            return by_state | {"peak": peak}
        more = {"peak": peak, "activations": max(0, peak - sum(by_state.values()))}
        return by_state | more | devices.allocator(self._device)

    @property
    def _compared(self) -> dict[str, float]:
        return compared_seconds(self._spent, self._steps, self._on_cuda)

    @property
    def _spent(self) -> StepTimes:
        return StepTimes(self._seconds, self._waited, self._data, self._activations)

    def _exchanged(self, times: Times, steps: int) -> dict[str, float]:
        known = {"n": times.count / steps, "sent_bytes": times.sent_bytes / steps}
        return known if self._on_cuda else known | exchange_seconds(times, steps)


def _move(times: Mapping[tuple[str, str], Times], into: _Exchanges, axis: str | None = None) -> None:
    """Add what has been counted, all of it to one axis if that is given, and have it counted from zero."""
    for (own, kind), each in times.items():
        if each.count or each.exposed_s:  # where a step is taken twice, all has been taken already
            into[own if axis is None else axis, kind].add(each)
            each.clear()


def _together(*groups: Mapping[tuple[str, str], Times]) -> _Exchanges:
    """Exchanges of several groups, which may have the same axis and kind."""
    merged: _Exchanges = defaultdict(Times)
    for exchanges in groups:
        for key, each in exchanges.items():
            merged[key].add(each)
    return merged
