"""The record of a step: where its time went, by phase and by cause; what was exchanged; what was in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from terrazzo.engine import Engine
from terrazzo.engine.instrumentation.times import Times
from terrazzo.engine.runtime import device as devices
from terrazzo.telemetry.log.step_record import RECORD_VERSION, ExchangeRow, StepRecord
from terrazzo.telemetry.steps.memory import PeakMemory

__all__ = [
    "CAUSE_OF_KIND",
    "PHASES",
    "TIME_CAUSES",
    "StepRecorder",
    "StepTimes",
    "causes_of",
    "compared_seconds",
    "exchange_row",
    "time_fields",
]

PHASES = ("input", "forward", "backward", "clip", "update", "evaluate", "save", "local_save", "other")
"""The phases of a step, in order. Each moment belongs to exactly one."""

_APART = ("update", "input", "evaluate", "save", "local_save")
"""Phases that are causes themselves, except for what the host waited in them."""

TIME_CAUSES = ("compute", "gather", "reduce", "exchange", "late_peer", "tier", *_APART)
"""What the host did, or waited for. Each moment belongs to exactly one."""

CAUSE_OF_KIND = {"all_gather": "gather", "broadcast": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}
CAUSE_OF_KIND |= {"update": "tier", "control": "late_peer"}
"""The cause of each kind of exchange of weights and gradients. Of activations all but `control` are `exchange`."""

_Exchanges = defaultdict[tuple[str, str], Times]
"""Times of exchanges, by axis and kind."""


class StepTimes(NamedTuple):
    """What steps took in all.

    Attributes:
        seconds: by phase.
        waited: seconds of these that the host waited, by phase.
        data: exchanges of weights and gradients, by axis and kind.
        activations: exchanges of activations, by axis and kind.
    """

    seconds: Mapping[str, float]
    waited: Mapping[str, float]
    data: Mapping[tuple[str, str], Times]
    activations: Mapping[tuple[str, str], Times]


def causes_of(spent: StepTimes) -> dict[str, float]:
    """Seconds by cause, which add up to those of all phases.

    A wait counts as `late_peer` until all other ranks have come to the exchange, and as the exchange's cause after
    that. `compute` is the rest: arithmetic on a CPU, and the work of engine and loop.
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


def time_fields(spent: StepTimes, steps: int, on_cuda: bool) -> StepRecord:
    """The fields of a record that say where the time went: means over `steps` steps.

    Records of CUDA have no causes: the device waits, and the host does not know for what.
    """
    count = max(1, steps)
    fields = StepRecord(
        v=RECORD_VERSION,
        steps=steps,
        step_s=sum(spent.seconds.values()) / count,
        clock="host" if on_cuda else "all",
        phase_s={name: seconds / count for name, seconds in spent.seconds.items()},
    )
    if not on_cuda:
        fields["cause_s"] = {name: seconds / count for name, seconds in causes_of(spent).items()}
    return fields


def compared_seconds(spent: StepTimes, steps: int, on_cuda: bool) -> dict[str, float]:
    """Mean seconds that ranks compare, by their names in a record's `skew`."""
    causes = causes_of(spent) | {"step": sum(spent.seconds.values())}
    names = ("input",) if on_cuda else ("step", "late_peer", "compute", "input")
    return {f"{name}_s": causes[name] / max(1, steps) for name in names}


def exchange_row(times: Times, steps: int, **known: float) -> ExchangeRow:
    """Mean seconds of waits for an exchange beside what else is `known` of it: a row of a record's `comm`."""
    seconds = {"exposed_s": times.exposed_s, "late_s": times.late_s}
    return cast(ExchangeRow, known | {name: value / steps for name, value in seconds.items()})


class StepRecorder:
    """Takes the engine's counts after each step, and makes one record of all steps since the last record.

    Args:
        engine: of the model; it is not kept alive.
        micro_batches: of a step on this rank.
    """

    def __init__(self, engine: Engine, micro_batches: int = 1) -> None:
        self._tally, self._device = engine.tally, engine.axes.device
        self._on_cuda, self._peak = devices.is_cuda(self._device), PeakMemory(self._device)
        bill = engine.promise.memory(micro_batches)
        sent, steps = engine.promise.round_traffic(micro_batches).by_name(), engine.promise.round_steps
        self._at_rest = {
            "weight": bill.weight_bytes,
            "master": bill.master_bytes,
            "grad": bill.grad_bytes,
            "moments": bill.moments_bytes,
        }
        self._promised = {
            "sent_bytes": {kind: count / steps for kind, count in sent.items() if kind != "control"},
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
        """A step has ended: take its counts."""
        self._steps += 1
        self.take()

    def take(self) -> None:
        """Take what has been counted so far; after a step, such as in a save, it is added to that step."""
        traffic = self._tally.traffic
        _move(traffic.times, self._data)
        for axis, along in traffic.along.items():
            _move(along.times, self._activations, axis)
        for taken, into in zip(self._tally.phases.drain(), (self._seconds, self._waited), strict=True):
            for phase, seconds in taken.items():
                into[phase] += seconds

    def numbers(self) -> list[float]:
        """This rank's values of what `skew` compares."""
        return [*self._compared.values(), float(self._peak.peak_bytes)]

    def skew(self, rows: Iterable[Iterable[float]]) -> dict[str, list[float]]:
        """The values of all ranks by name, given `numbers` of each rank in order.

        The rank that all others wait for has the least `late_peer_s`.
        """
        names = (*self._compared, "peak_bytes")
        return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    def record(self) -> StepRecord:
        """The mean of all steps since the last call; `docs/concepts/step-record.md` describes every field."""
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
        """Bytes by state. On a CPU the rest of the peak is not split up: libraries and malloc keep some of it."""
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

    def _exchanged(self, times: Times, steps: int) -> ExchangeRow:
        count, sent = times.count / steps, times.sent_bytes / steps
        if self._on_cuda:
            return {"n": count, "sent_bytes": sent}
        return exchange_row(times, steps, n=count, sent_bytes=sent, total_s=times.total_s / steps)


def _move(times: Mapping[tuple[str, str], Times], into: _Exchanges, axis: str | None = None) -> None:
    """Add the counts to `into`, under `axis` if that is given, and reset them."""
    for (own, kind), each in times.items():
        if each.count or each.exposed_s:  # a step that is taken twice adds nothing
            into[own if axis is None else axis, kind].add(each)
            each.clear()


def _together(*groups: Mapping[tuple[str, str], Times]) -> _Exchanges:
    """The exchanges of several groups, added up where axis and kind are the same."""
    merged: _Exchanges = defaultdict(Times)
    for exchanges in groups:
        for key, each in exchanges.items():
            merged[key].add(each)
    return merged
