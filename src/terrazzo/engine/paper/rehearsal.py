"""A step on paper: the real schedule run on units that count bytes instead of moving them.

There is no second description of the engine to drift from it: order, prefetch, release and reduction are the code that
will run, and only the moves are replaced by their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from terrazzo.engine.axes import Axes
from terrazzo.engine.bucket import Bucket
from terrazzo.engine.links.label import Label
from terrazzo.engine.links.transfer import Handle, Ledger, Moves, Traffic
from terrazzo.engine.order import Order, contains
from terrazzo.engine.pass_end import MEETING_NUMEL, meets
from terrazzo.engine.recipe import Recipe
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.unit import Unit

__all__ = ["PaperUnit", "rehearse"]


def rehearse(units: Sequence[Unit], prefetch: int, micro_batches: int, local_sums: bool) -> tuple[Ledger, Traffic]:
    """Transient memory and traffic of one optimizer step on this rank.

    Args:
        units: in registration order; they need not be built.
        micro_batches: forward and backward passes in the step.
        local_sums: whether those before the last only add their gradients on this rank.
    """
    ledger, traffic = Ledger(), Traffic()
    paper = [PaperUnit(unit, ledger, traffic) for unit in units]
    schedule = Schedule(paper, Order.of_registration(units), prefetch)
    recipe = units[0].buckets[0].recipe
    if meets(recipe):
        schedule.meet = lambda label, wanted: _meet(recipe, traffic)
    for index in range(micro_batches):
        schedule.accumulating, schedule.reduce_each = index < micro_batches - 1, not local_sums
        _forward(schedule, units, paper)
        _backward(schedule, paper)
        if not schedule.accumulating or (schedule.meet is None and not local_sums):
            _record_control(recipe, traffic, _flags(units))
    if recipe.precision.loss_scaling:
        _record_control(recipe, traffic, 1)  # overflow
    for unit in paper:
        unit.publish()
    return ledger, traffic


def _forward(schedule: Schedule, units: Sequence[Unit], paper: Sequence[PaperUnit]) -> None:
    inside: list[Unit] = []
    schedule.begin_forward(training=True)
    for unit in units:
        while inside and not contains(inside[-1], unit):
            schedule.leave_forward(paper[inside.pop().index], training=True)
        schedule.enter_forward(paper[unit.index])
        inside.append(unit)
    for unit in reversed(inside):
        schedule.leave_forward(paper[unit.index], training=True)
    schedule.end_forward()


def _backward(schedule: Schedule, paper: Sequence[PaperUnit]) -> None:
    schedule.begin_backward()
    for index in schedule.order.backward:
        schedule.enter_backward(paper[index])
        paper[index].take_gradients(schedule.sums_locally)
        schedule.halfway()
    schedule.end_backward()
    schedule.finish()


def _meet(recipe: Recipe, traffic: Traffic) -> int:
    _record_control(recipe, traffic, MEETING_NUMEL + 1)
    return 0


def _record_control(recipe: Recipe, traffic: Traffic, numel: int) -> None:
    for _ in recipe.axes.live(recipe.axes.names):
        traffic.record("control", numel * torch.int64.itemsize)


def _flags(units: Sequence[Unit]) -> int:
    """int64 elements of the agreement at the end of backward."""
    return MEETING_NUMEL + 1 + len(units) + sum(len(bucket.members) for unit in units for bucket in unit.trainable())


class PaperUnit:
    """Stands for a unit before `Schedule`, which cannot tell the difference."""

    def __init__(self, unit: Unit, ledger: Ledger, traffic: Traffic) -> None:
        self._unit, self.index, self.name, self.has_gradients = unit, unit.index, unit.name, unit.has_gradients
        self._buckets = [_PaperBucket(bucket, ledger, traffic) for bucket in unit.buckets]

    @property
    def regathered(self) -> bool:
        return self._unit.regathered

    @property
    def fills_gradually(self) -> bool:
        return self._unit.fills_gradually

    @property
    def at_hand(self) -> bool:
        return all(bucket.present for bucket in self._buckets)

    def gather(self, label: Label, from_rest: bool = False) -> None:
        for bucket in self._buckets:
            bucket.gather()

    def further(self) -> None:
        """Nothing is under way on paper."""

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.drop_held()

    def rest_between(self) -> None:
        for bucket in self._buckets:
            bucket.rest_between()

    def release(self) -> None:
        for bucket in self._buckets:
            bucket.release()

    def rest(self) -> None:
        for bucket in self._buckets:
            bucket.release()
            bucket.drop_held()

    def take_gradients(self, local_sums: bool) -> None:
        for bucket in self._buckets:
            bucket.take_gradients(local_sums)

    def reduce(self, denominator: float | None) -> Moves:
        for bucket in self._buckets:
            if bucket.real.trainable:
                yield from bucket.reduce(last=denominator is not None)
        return torch.empty(0)

    def publish(self) -> None:
        for bucket in self._buckets:
            if any(member.group >= 0 for member in bucket.real.members):
                bucket.publish()


class _PaperBucket:
    """The sizes behind `Bucket`'s moves."""

    def __init__(self, bucket: Bucket, ledger: Ledger, traffic: Traffic) -> None:
        self.real, self._ledger, self._traffic = bucket, ledger, traffic
        self._full_bytes = bucket.space.layout.numel * bucket.compute_dtype.itemsize
        self._wire_bytes = bucket.recipe.precision.reduce.itemsize
        self.present = bucket.resident
        self._held_bytes = self._pending_bytes = self._partial_bytes = 0

    @property
    def _axes(self) -> Axes:
        return self.real.recipe.axes

    def _numel(self, axes: tuple[str, ...]) -> int:
        return self.real.space.range(axes).numel

    def gather(self) -> None:
        if not self.present:
            self.present = True
            self._ledger.take(self._full_bytes)
            source = self.real.between_axes if self._held_bytes else self.real.weight_axes
            self._all_gather(source, (), self.real.compute_dtype.itemsize)

    def _all_gather(self, source: tuple[str, ...], target: tuple[str, ...], itemsize: int) -> None:
        while len(source) > len(target):
            gained = self._numel(source[:-1]) - self._numel(source)
            self._traffic.record("all_gather", gained * itemsize)
            source = source[:-1]

    def rest_between(self) -> None:
        bucket = self.real
        if bucket.resident or bucket.keeps_full:
            return
        if bucket.between_axes != bucket.weight_axes and not self._held_bytes:
            self._held_bytes = self._numel(bucket.between_axes) * bucket.compute_dtype.itemsize
            self._ledger.take(self._held_bytes)
        self.release()

    def release(self) -> None:
        if self.present and not self.real.resident:
            self.present = False
            self._ledger.give(self._full_bytes)

    def drop_held(self) -> None:
        self._ledger.give(self._held_bytes)
        self._held_bytes = 0

    def take_gradients(self, local_sums: bool) -> None:
        if self.real.trainable and not self._pending_bytes:
            precision = self.real.recipe.precision
            dtype = precision.accumulate if local_sums else precision.reduce
            self._pending_bytes = self.real.space.layout.numel * dtype.itemsize
            self._ledger.take(self._pending_bytes)

    def reduce(self, last: bool) -> Moves:
        bucket, held_bytes = self.real, self._pending_bytes
        gradient, self._pending_bytes = bucket.gradient, 0
        first = gradient.first_axes(last)
        yield from self._reduce_scatter((), first)
        if self._axes.live(first):
            self._ledger.give(held_bytes)
            held_bytes = 0
        self._ledger.give(self._partial_bytes)
        self._partial_bytes = 0
        if not last:
            on_device = bucket.tiers.grad == "device"
            self._partial_bytes = on_device * self._numel(first) * bucket.recipe.precision.accumulate.itemsize
            self._ledger.take(self._partial_bytes)
        else:
            rest_bytes = self._numel(first) * bucket.recipe.precision.accumulate.itemsize
            counted = rest_bytes if not held_bytes and gradient.moves_after(first) else 0
            self._ledger.take(counted)
            yield from self._reduce_scatter(first, bucket.optim_axes)
            for axis in self._axes.live(gradient.replica_axes):
                yield from self._all_reduce(axis)
            self._ledger.give(counted)
        self._ledger.give(held_bytes)
        return torch.empty(0)

    def _reduce_scatter(self, source: tuple[str, ...], target: tuple[str, ...]) -> Moves:
        while len(source) < len(target):
            axis, before = target[len(source)], self._numel(source)
            source = target[: len(source) + 1]
            self._traffic.record("reduce_scatter", (before - self._numel(source)) * self._wire_bytes)
            yield from self._receive(axis, before * self._wire_bytes)
        return torch.empty(0)

    def _all_reduce(self, axis: str) -> Moves:
        full_bytes, size = self._numel(self.real.optim_axes) * self._wire_bytes, self._axes.along(axis).size
        self._traffic.record("all_reduce", 2 * (full_bytes // size * (size - 1)))
        yield from self._receive(axis, full_bytes)
        for _ in range(1, self._axes.along(axis).all_reduce_steps):
            yield Handle(Traffic(), [])
        return torch.empty(0)

    def _receive(self, axis: str, full_bytes: int) -> Moves:
        receive_bytes = self._axes.along(axis).receive_bytes(full_bytes)
        self._ledger.take(receive_bytes)
        yield Handle(Traffic(), [])
        self._ledger.give(receive_bytes)
        return torch.empty(0)

    def publish(self) -> None:
        bucket = self.real
        apart_bytes = bucket.gathers_apart * self._numel(bucket.weight_axes) * bucket.weight_dtype.itemsize
        with self._ledger.holding(apart_bytes):
            self._all_gather(bucket.optim_axes, bucket.weight_axes, bucket.weight_dtype.itemsize)
