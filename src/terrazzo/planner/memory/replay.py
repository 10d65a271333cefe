"""The engine on paper: a traced pass put on the schedule of a plan, and the moment at which most is held.

Units, schedule and moves are the engine's own, with sizes in place of tensors (`terrazzo.engine.paper.rehearsal`), so
there is no second description of it here. Only the activations between its events come from a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from terrazzo.engine.bucket import Bucket, Member
from terrazzo.engine.links.collectives import NEAR_BLOCK_BYTES
from terrazzo.engine.links.transfer import Ledger, Moves, Traffic
from terrazzo.engine.order import Order
from terrazzo.engine.paper.rehearsal import PaperUnit
from terrazzo.engine.place import DATA_AXES, Place, Plan
from terrazzo.engine.precision import Precision
from terrazzo.engine.recipe import Recipe, Tiers
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.unit import Unit
from terrazzo.planner.figures import Memory
from terrazzo.planner.formulas import FORMULAS, Formula, Term
from terrazzo.planner.memory.overheads import device_bytes, reserved_bytes, upper_bytes
from terrazzo.planner.memory.tiers import disk_writes, tier_terms
from terrazzo.planner.memory.trace import ActivationTrace, Event
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = ["Peak", "memory_of_trace", "paper_units", "replay", "updated_apart_numel", "updated_numels"]

FORMULAS |= {
    "memory.traced": Formula(
        "the fullest moment of a step in which the model's own operators were run by their shapes alone, between the "
        "engine's own gathers and reductions",
        "terrazzo/planner/memory/trace.py and replay.py; terrazzo/engine/paper/rehearsal.py",
    ),
}


@dataclass(frozen=True)
class Peak:
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


def replay(setup: Setup, trace: ActivationTrace, update_bytes: int = 0) -> Peak:
    """Play a step of `setup` with the activations of `trace`.

    Args:
        trace: of one micro-batch, its units in the order of `setup.model`.
        update_bytes: what the optimizer needs while it steps, see `optimizer_temporaries`.
    """
    units = paper_units(setup)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    states = _states(setup, buckets)
    player = _Player(setup, units, trace)
    count = min(setup.micro_batches, 3)  # the first, one in the middle, and the last, which finishes the gradients
    for index in range(count):
        player.play(last=index == count - 1)
    finished = [bucket for bucket in buckets if bucket.trainable and bucket.tiers.grad == "device"]
    grads = sum(_numel(b, b.optim_axes) * setup.precision.accumulate.itemsize for b in finished)
    update = {"gradients": grads, "activations": trace.buffer_bytes, "update": update_bytes}
    candidates = [*player.peaks.items(), ("update", update)]
    moment, parts = max(candidates, key=lambda candidate: sum(candidate[1].values()))
    return Peak(moment, {**states, **parts})


def memory_of_trace(setup: Setup, trace: ActivationTrace, update_bytes: int = 0) -> Memory:
    """`memory_of` with activations as traced; for one pipeline stage. Arguments as for `replay`."""
    peak = replay(setup, trace, update_bytes)
    terms = tuple(Term(name, value, value, "memory.traced") for name, value in peak.parts.items())
    expected, (host, disk) = float(peak.total_bytes), tier_terms(setup, 0)
    return Memory(
        terms=terms,
        upper_bytes=upper_bytes(setup, sum(term.upper for term in terms)),
        reserved_bytes=reserved_bytes(setup, expected),
        device_bytes=device_bytes(setup, expected),
        limiting_rank=f"every rank alike, fullest in {peak.moment}",
        per_stage=(expected,),
        host=host,
        disk=disk,
        disk_writes=disk_writes(setup, 0),
        capacity_bytes=setup.cluster.device.memory_bytes,
        ranks_per_host=min(setup.cluster.count, setup.cluster.device.per_node),
        host_capacity_bytes=setup.cluster.host_memory_bytes,
        disk_capacity_bytes=setup.cluster.disk_bytes,
        on_host=setup.cluster.device.kind == "cpu",
    )


def paper_units(setup: Setup) -> list[Unit]:
    """The engine's units of the model under the plan, nothing allocated; equal ones share their buckets."""
    axes = _PaperAxes(setup.mesh.sizes() or {"dp_shard": 1}, near=setup.cluster.device.kind == "cpu")
    resolved = setup.plan.resolve(axes.names)
    live = {state: Place(axes.live(place.axes), place.tier) for state, place in resolved.places().items()}
    recipe = Recipe(axes, Plan(**live, name=setup.plan.name), setup.precision)  # type: ignore[arg-type]
    shapes = [unit for unit in setup.model.units for _ in range(unit.count)]
    kinds: dict[tuple[UnitShape, Tiers, bool], list[Bucket]] = {}
    units: list[Unit] = []
    for index, unit in enumerate(shapes):
        kind = (unit, recipe.tiers(index, len(shapes)), index == 0)
        if kind not in kinds:
            kinds[kind] = _buckets(unit, recipe, keep=index == 0, tiers=kind[1])
        name = f"{unit.name}.{index}" if index else ""
        units.append(_PlannedUnit(name, index, kinds[kind], setup.compile))
    return units


def _buckets(unit: UnitShape, recipe: Recipe, keep: bool, tiers: Tiers) -> list[Bucket]:
    """As the engine groups them: trainable parameters, then frozen ones."""
    groups: dict[bool, list[Member]] = {}
    for tensor in unit.tensors:
        parameter = nn.Parameter(torch.empty(tensor.shape, device="meta"), requires_grad=tensor.trainable)
        groups.setdefault(not tensor.trainable, []).append(Member((tensor.name,), parameter, ()))
    return [Bucket(groups[key], recipe, keep=keep, tiers=tiers) for key in sorted(groups)]


class _PlannedUnit(Unit):
    """A unit without a module."""

    def __init__(self, name: str, index: int, buckets: list[Bucket], compiled: bool) -> None:
        super().__init__(name, index, _NOWHERE, buckets)
        self._compiled = compiled

    @property
    def fills_gradually(self) -> bool:
        return self.has_gradients and not self._compiled


_NOWHERE = nn.Module()


class _PaperAxes:
    """`engine.axes.Axes` without a process group: this is the first rank of each axis."""

    def __init__(self, sizes: Mapping[str, int], near: bool) -> None:
        self.names = tuple(axis for axis in DATA_AXES if axis in sizes)
        self._axes = {axis: _PaperAxis(sizes[axis], near) for axis in self.names}

    def along(self, axis: str) -> _PaperAxis:
        return self._axes[axis]

    def size(self, axes: Iterable[str] | None = None) -> int:
        return math.prod(self._axes[axis].size for axis in (self.names if axes is None else axes))

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self._axes[axis].size > 1)

    def cuts(self, axes: Iterable[str]) -> list[tuple[int, int]]:
        return [(0, self._axes[axis].size) for axis in axes]


@dataclass(frozen=True)
class _PaperAxis:
    size: int
    near: bool

    @property
    def all_reduce_steps(self) -> int:
        return 2 if self.near else 1

    def receive_bytes(self, full_bytes: int) -> int:
        return (self.size - 1) * min(full_bytes // self.size, NEAR_BLOCK_BYTES) if self.near else 0


def _numel(bucket: Bucket, axes: tuple[str, ...]) -> int:
    return bucket.space.range(axes).numel


def _updated_numel(bucket: Bucket) -> int:
    """Elements that the optimizer of the first rank sees: all but the padding at the end of the space."""
    return min(_numel(bucket, bucket.optim_axes), bucket.slots[-1].padded.stop)


def updated_numels(units: Sequence[Unit]) -> list[int]:
    """Elements of each tensor that the optimizer of the first rank steps on the device.

    Matrices of all units come first, then their vectors.
    """
    buckets = [bucket for unit in units for bucket in unit.trainable() if not bucket.updated_apart]
    found = [_matrices_and_vectors(bucket) for bucket in buckets]
    return [numel for numel in (*(first for first, _ in found), *(rest for _, rest in found)) if numel]


def updated_apart_numel(units: Sequence[Unit], cell: int) -> int:
    """Elements of the largest tensor that is stepped away from the device; those on drives are stepped cell by cell."""
    buckets = [bucket for unit in units for bucket in unit.trainable() if bucket.updated_apart]
    most = [min(max(_matrices_and_vectors(b)), cell if b.tiers.optim == "nvme" else math.inf) for b in buckets]
    return int(max(most, default=0))


def _matrices_and_vectors(bucket: Bucket) -> tuple[int, int]:
    matrices = min(_updated_numel(bucket), sum(s.padded.numel for s in bucket.slots if len(s.shape) >= 2))
    return matrices, _updated_numel(bucket) - matrices


def _states(setup: Setup, buckets: Sequence[Bucket]) -> dict[str, int]:
    precision, recipe = setup.precision, setup.optimizer
    moment_bytes = recipe.moments * (recipe.moment_bytes or precision.moments.itemsize)
    weights = [bucket for bucket in buckets if bucket.tiers.weight == "device"]
    updated = [bucket for bucket in buckets if bucket.trainable and not bucket.updated_apart]
    return {
        "weights": sum(_numel(b, b.weight_axes) * b.weight_dtype.itemsize for b in weights),
        "master": sum(_numel(b, b.optim_axes) * precision.master.itemsize for b in updated if b.has_own_master),
        "moments": round(sum(_updated_numel(b) * moment_bytes for b in updated)),
    }


class _Player:
    """Drives the schedule by the events of a trace, as `engine.hooks` does by those of a model."""

    def __init__(self, setup: Setup, units: Sequence[Unit], trace: ActivationTrace) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._trace = trace
        self._ledger, self._sums = _Observed(self._hold), _Observed(self._hold)
        self._paper = [_Unit(unit, self._ledger, self._sums, setup.precision) for unit in units]
        self._schedule = Schedule(self._paper, Order.of_registration(units), setup.prefetch)
        self._local_sums = setup.accumulate_locally or not units[0].buckets[0].recipe.plan.grad.axes
        names = list(dict.fromkeys(event.unit for event in trace.events))
        assert len(names) == len(units), f"{len(names)} units traced, {len(units)} in the model"
        self._index = {name: index for index, name in enumerate(names)}
        self._moment, self._live = "forward", trace.buffer_bytes

    def play(self, *, last: bool) -> None:
        """One micro-batch."""
        schedule = self._schedule
        schedule.accumulating, schedule.reduce_each = not last, not self._local_sums
        self._moment, self._live = "forward", self._trace.buffer_bytes
        for unit in self._paper:
            unit.filled_numel = 0
        schedule.begin_forward(training=True)
        for event in self._trace.events:
            self._hold(event.rise)
            self._live += event.change
            self._happen(event)

    def _happen(self, event: Event) -> None:
        schedule, unit = self._schedule, self._paper[self._index[event.unit]]
        if event.kind == "enter":
            schedule.enter_forward(unit)
        elif event.kind == "leave":
            schedule.leave_forward(unit, training=True)
            if unit.index == 0:
                schedule.end_forward()
        elif event.kind == "end":
            schedule.end_backward()
            schedule.finish()
        else:
            self._begin_backward()
            if event.kind == "backward":
                schedule.enter_backward(unit)
            else:
                unit.take(event.numel, schedule.sums_locally)
                if schedule.holds_back(unit) and unit.half_filled:
                    schedule.halfway()

    def _begin_backward(self) -> None:
        if not self._schedule.in_backward:
            self._moment = "backward"
            self._schedule.begin_backward()

    def _hold(self, rise: int = 0) -> None:
        held = (self._sums.live_bytes, self._ledger.live_bytes, self._live + rise)
        if sum(held) > sum(self.peaks.get(self._moment, {}).values()):
            self.peaks[self._moment] = dict(zip(("gradients", "transient", "activations"), held, strict=True))


class _Observed(Ledger):
    """A ledger that tells when more is taken."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    def take(self, count_bytes: int) -> None:
        super().take(count_bytes)
        self._told()


class _Unit(PaperUnit):
    """A unit on paper that also counts its sums, the finished gradients among them."""

    def __init__(self, unit: Unit, ledger: Ledger, sums: Ledger, precision: Precision) -> None:
        super().__init__(unit, ledger, Traffic())
        self._sums, self._itemsize = sums, precision.accumulate.itemsize
        self._trainable = list(unit.trainable())
        self.filled_numel = 0

    @property
    def half_filled(self) -> bool:
        return 2 * self.filled_numel >= sum(slot.numel for bucket in self._trainable for slot in bucket.slots)

    def take(self, numel: int, local_sums: bool) -> None:
        self.take_gradients(local_sums)
        self.filled_numel += numel

    def reduce(self, denominator: float | None) -> Moves:
        """Each reduce-scatter makes a sum of its own; what it summed goes when it has ended."""
        last = denominator is not None
        sums = self._sums_bytes(last)
        gradients = [bucket.gradient for bucket in self._trainable]
        stays = last and not any(gradient.moves_after(gradient.first_axes(last)) for gradient in gradients)
        held = 0
        for index, handle in enumerate(super().reduce(denominator)):
            before, now = sums[index - 1 : index], sums[index : index + 1]
            held = self._hold(held, sum(before) + sum(now))
            yield handle
            held = self._hold(held, sum(now) if stays or index + 1 < len(sums) else 0)
        kept = [bucket for bucket in self._trainable if last and bucket.tiers.grad == "device"]
        done = sum(_numel(b, b.optim_axes) for b in kept) * self._itemsize
        self._hold(held, done)
        return torch.empty(0)

    def _hold(self, before: int, now: int) -> int:
        self._sums.give(before)
        self._sums.take(now)
        return now

    def _sums_bytes(self, last: bool) -> list[int]:
        """Of each reduce-scatter of the unit in turn; what is summed after those, is summed in place."""
        found = []
        for bucket in self._trainable:
            axes = bucket.recipe.axes.live(bucket.gradient.first_axes(last))
            found += [_numel(bucket, axes[: count + 1]) * self._itemsize for count in range(len(axes))]
        return found
