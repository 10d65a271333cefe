"""The engine's schedule over a traced pass: what a plan makes of it, and the moment at which most is held.

Units, schedule and moves are the engine's own, with sizes in place of tensors (`terrazzo.engine.dry_run.counting`).
Only the activations between its events come from a trace. `walk` describes the same step again, faster, for a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.dry_run.counting import CountingUnit, ExpectedGradient, StepCounts, agree
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.plan.bucket_bytes import resting_bytes
from terrazzo.engine.plan.bucket_memory import publishes_late
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.plan.place import Tiers
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.planner.figures import Formula, MemoryFigures, Term
from terrazzo.planner.layout.buckets import PlannedBucket, buckets
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.memory.outer_memory import outer_held_bytes, under_way_bytes
from terrazzo.planner.memory.overheads import upper_bytes
from terrazzo.planner.memory.peak import RankTerms, fullest_memory
from terrazzo.planner.memory.trace import ActivationTrace, TraceEvent
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "FORMULAS",
    "TracedPeak",
    "memory_of_trace",
    "planned_units",
    "replay",
    "updated_apart_numel",
    "updated_numels",
]

FORMULAS = {
    "memory.traced": Formula(
        "the fullest moment of a step in which the model's own operators were run by their shapes alone, between the "
        "engine's own gathers and reductions",
        "terrazzo/planner/memory/trace.py and replay.py; terrazzo/engine/dry_run/counting.py",
    ),
}


@dataclass(frozen=True)
class TracedPeak:
    """What one rank holds at the fullest moment of a step, in bytes, and which moment that is.

    Attributes:
        moment: `forward`, `backward` or `update`.
        parts: `weights`, `master`, `moments`, `gradients`, `transient` (gathered weights, unreduced gradients and what
            arrives from other ranks), `activations` with all that operators make, `update` of the optimizer.
    """

    moment: str
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def replay(setup: Setup, trace: ActivationTrace, update_bytes: int = 0) -> TracedPeak:
    """Play a step of `setup` with the activations of `trace`.

    Args:
        trace: of one micro-batch, its units in the order of `setup.model`.
        update_bytes: what the optimizer needs while it steps.
    """
    units = planned_units(setup)
    states, grads = _states([bucket for unit in units for bucket in unit])
    player, behind = _Player(setup, units, trace), _Player(setup, units, trace)
    count = min(setup.micro_batches, 3)  # the first, one in the middle, and the last, which finishes the gradients
    for index in range(count):
        player.play(last=index == count - 1)
    if setup.offload.step != "synchronous" and any(publishes_late(bucket) for unit in units for bucket in unit):
        behind.begin_updates()
        behind.play(last=count == 1)
    update = {
        "gradients": grads,
        "activations": trace.buffer_bytes,
        "update": max(update_bytes + round(under_way_bytes(setup, 0)), round(outer_held_bytes(setup, 0))),
    }
    candidates = [*player.peaks.items(), *behind.peaks.items(), ("update", update)]
    moment, parts = max(candidates, key=lambda candidate: sum(candidate[1].values()))
    return TracedPeak(moment, {**states, **parts})


def memory_of_trace(setup: Setup, trace: ActivationTrace, update_bytes: int = 0) -> MemoryFigures:
    """`memory_of` with activations as traced; not for pipelines. Arguments as for `replay`."""
    peak = replay(setup, trace, update_bytes)
    terms = tuple(Term(name, value, value, "memory.traced") for name, value in peak.parts.items())
    held = RankTerms(terms, peak.moment, upper_bytes(setup, terms))
    return fullest_memory(setup, 0, held, f"every rank alike, fullest in {peak.moment}")


def planned_units(setup: Setup) -> list[tuple[PlannedBucket, ...]]:
    """The buckets of each unit of the model under the plan, whose ranks are all on one host."""
    shapes = [unit for unit in setup.model.units for _ in range(unit.count)]
    places, host = setup.plan.resting_places, setup.mesh.world_size
    tiers = [Tiers(*(place.tier_of(index, len(shapes)) for place in places)) for index in range(len(shapes))]
    placements = {one: placement_of(setup, one) for one in tiers}
    near = {one: replace(placement, host=placement.host and host) for one, placement in placements.items()}
    return [buckets(unit, near[one]) for unit, one in zip(shapes, tiers, strict=True)]


def updated_numels(units: Sequence[Sequence[PlannedBucket]]) -> list[int]:
    """Elements of each tensor that the optimizer of the first rank steps element by element on the device.

    Matrices of all units come first, then their vectors.
    """
    groups = [bucket.runs for unit in units for bucket in unit if bucket.trainable and not bucket.updated_off_device]
    return [numel for numel in (*(each.other_matrices for each in groups), *(each.vectors for each in groups)) if numel]


def updated_apart_numel(units: Sequence[Sequence[PlannedBucket]], cell: int) -> int:
    """Elements of the largest tensor that is stepped away from the device; those on drives are stepped cell by cell."""
    apart = [bucket for unit in units for bucket in unit if bucket.updated_off_device]
    most = [min(max(bucket.runs), cell if bucket.tiers.optim == "nvme" else math.inf) for bucket in apart]
    return int(max(most, default=0))


def _states(all_buckets: Sequence[PlannedBucket]) -> tuple[dict[str, int], int]:
    """Bytes of the states at rest on the device, and of finished gradients."""
    here = resting_bytes(all_buckets)
    updated = [bucket for bucket in all_buckets if bucket.trainable and not bucket.updated_off_device]
    moments = round(sum(bucket.moments_bytes for bucket in updated))
    states = {"weights": here["weight"], "master": here["master"], "moments": moments}
    return states | {name: here[name] for name in ("outer", "residuals") if here[name]}, here["grad"]


class _Player:
    """Drives the schedule by the events of a trace, as `engine.hooks` does by those of a model."""

    def __init__(self, setup: Setup, units: Sequence[Sequence[PlannedBucket]], trace: ActivationTrace) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._trace = trace
        comm_streams = None if setup.cluster.device.kind == "cpu" else CommStreams(torch.device("meta"))
        self._counts = StepCounts(Traffic(), _Observed(self._hold), comm_streams, _Observed(self._hold))
        self._counts.transient.live_bytes = round(under_way_bytes(setup, 0))  # an exchange of outer gradients
        names = list(dict.fromkeys(event.unit for event in trace.events))
        assert len(names) == len(units), f"{len(names)} units traced, {len(units)} in the model"
        comes_back = {event.unit for event in trace.events if event.kind == "backward"}
        self._counting = [
            _Unit(index, unit, setup.compile, name not in comes_back, self._counts)
            for index, (name, unit) in enumerate(zip(names, units, strict=True))
        ]
        self._schedule = Schedule(self._counting, setup.prefetch)
        self._local_sums = setup.sums_locally
        self._index = {name: index for index, name in enumerate(names)}
        self._moment, self._live = "forward", trace.buffer_bytes

    def begin_updates(self) -> None:
        """Updates away from the device run on into the next forward."""
        for unit in self._counting:
            if any(bucket.spec.updated_off_device for bucket in unit.buckets):
                unit.weights.begin_update()

    def play(self, *, last: bool) -> None:
        """One micro-batch."""
        schedule = self._schedule
        schedule.set_fate(
            GradientFate.FINISHED if last else GradientFate.LOCAL if self._local_sums else GradientFate.REDUCED
        )
        self._moment, self._live = "forward", self._trace.buffer_bytes
        self._forward = schedule.begin_forward(training=True)
        for event in self._trace.events:
            self._hold(event.rise)
            self._live += event.change
            self._happen(event)

    def _happen(self, event: TraceEvent) -> None:
        schedule, unit = self._schedule, self._counting[self._index[event.unit]]
        if event.kind == "enter":
            self._forward.enter(unit)
        elif event.kind == "leave":
            self._forward.leave(unit, unit.backward_to_come)
            if unit.index == 0:
                schedule.end_forward()
                agree(schedule)
        else:
            self._moment = "backward"
            backward = schedule.backward or schedule.begin_backward()
            if event.kind == "backward":
                backward.enter(unit, backward.of_forward)
            elif event.kind == "end":
                backward.end()
                schedule.end_backward()
            else:
                unit.take_gradient(event, backward.fate)
                backward.gradient_came(unit)

    def _hold(self, rise: int = 0) -> None:
        parts = (self._counts.sums.live_bytes, self._counts.transient.live_bytes, self._live + rise)
        if sum(parts) > sum(self.peaks.get(self._moment, {}).values()):
            self.peaks[self._moment] = dict(zip(("gradients", "transient", "activations"), parts, strict=True))


class _Observed(Ledger):
    """A ledger that tells when more is taken."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    def acquire(self, count_bytes: int) -> None:
        super().acquire(count_bytes)
        self._told()


class _Unit(CountingUnit):
    """A unit whose parameters get their gradients as a trace has them."""

    def __init__(
        self,
        index: int,
        unit_buckets: Sequence[PlannedBucket],
        compiled: bool,
        forward_only: bool,
        counts: StepCounts,
    ) -> None:
        super().__init__(str(index or ""), index, unit_buckets, compiled, forward_only, counts)
        self._gradient_of = {
            tensor.name: ExpectedGradient(place, tensor.numel, number)
            for number, bucket in enumerate(unit_buckets)
            for place, tensor in zip(bucket.places, bucket.tensors, strict=True)
            if bucket.trainable
        }
        self.gradients += self._gradient_of.values()

    def take_gradient(self, event: TraceEvent, fate: GradientFate) -> None:
        """Add a parameter's gradient; one that the shapes call otherwise, as of adapters, opens all buckets' memory."""
        if (gradient := self._gradient_of.get(event.parameter)) is not None:
            self.add_gradient(gradient, fate)
        else:
            for number in range(len(self.buckets)):
                self.add_gradient(ExpectedGradient(0, event.numel * (number == 0), number), fate)
