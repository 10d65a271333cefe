"""Meetings of ranks at the end of a pass: to hear who needs what, and to notice if they have not run the same."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.comm.collectives import TRAIL
from terrazzo.engine.instrumentation.label import RUN_THE_SAME, Label, moving
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart

__all__ = ["MEETING_NUMEL", "meet", "weights_are_split"]

K = TypeVar("K", bound=Hashable)
MEETING_NUMEL = 4
"""int64 elements that each meeting exchanges over every axis, besides its numbers."""


def weights_are_split(units: Iterable[Unit]) -> bool:
    """Whether weights at rest are, so that a rank can need those of another in the middle of a pass."""
    return any(bucket.spec.weight_axes for unit in units for bucket in unit.buckets)


def meet(axes: Axes, progress: Progress, label: Label, numbers: Sequence[int]) -> list[int]:
    """Return the elementwise maximum of the `numbers` of all ranks, which meet at `label`; blocks.

    Raises:
        RanksApart: if another rank has come with another label, or has issued other exchanges than this one on a
            transport whose messages carry no labels.
    """
    checksum = _checksum(axes, progress)
    values = torch.tensor([label.code, ~label.code, checksum, ~checksum, *numbers], device=HOST)
    before = moving.set(label)
    try:
        highest, lowest, largest, smallest, *top = axes.maximum(values).tolist()
    finally:
        moving.reset(before)
    label.check(highest, "another rank")
    label.check(~lowest, "another rank")
    if largest != ~smallest:
        _name_difference(axes, progress, label)
    return [int(number) for number in top]


def _checksum(axes: Axes, progress: Progress) -> int:
    """A checksum of what must be equal on all ranks: optimizer steps and their hyper-parameters, what the loop has
    done to gradients, what they are multiplied and divided by, and what has been exchanged on transports whose
    messages carry no labels.
    """
    checksum = zlib.crc32(struct.pack("<qq", progress.steps, progress.edits))
    numbers = [*_hyper_parameters(progress).values(), *progress.denominator.numbers().values()]
    checksum = zlib.crc32(array("d", numbers).tobytes(), checksum)
    for axis in axes.with_experts:
        checksum = zlib.crc32(axes.along(axis).checksum.to_bytes(4, "little"), checksum)
    return checksum


def _hyper_parameters(progress: Progress) -> dict[tuple[int, str], float]:
    every = progress.hyper_parameters.items()
    return {(first, name): value for first, numbers in every for name, value in numbers.values().items()}


def _name_difference(axes: Axes, progress: Progress, label: Label) -> None:
    """Raise an error that names what differs between ranks, whose checksums do.

    Raises:
        RanksApart: naming steps, gradients, hyper-parameters, denominators, or the first exchange in which they do.
    """
    apart = f"The ranks have not run the same: before {label},"
    if (steps := _first_apart(axes, {"steps": progress.steps})) is not None:
        _, own, low, high = steps
        raise RanksApart(
            f"{apart} optimizer.step() has been called {own:.0f} times here, and from {low:.0f} to {high:.0f} times "
            "on all ranks. Every rank must step, or none: agree on it, for example with an all_reduce of whether the "
            "loss is finite."
        )
    if axes.differing({"edits": progress.edits}):
        raise RanksApart(
            f"{apart} gradients have been forgotten or changed on some ranks and not on others, or by other numbers; "
            f"what was done last here: {progress.last_edit}. Each rank steps its own part of the weights: call "
            "zero_grad(), set .grad to None, scale and clip on every rank or on none."
        )
    if (hyper_parameter := _first_apart(axes, _hyper_parameters(progress))) is not None:
        (_, name), own, low, high = hyper_parameter
        raise RanksApart(
            f"{apart} optimizer.step() has used {name} = {own} here, and {low} to {high} on all ranks. Set the same on "
            "every rank: give a scheduler that follows a metric, such as ReduceLROnPlateau, the metric's mean over the "
            "ranks."
        )
    if (divisor := _first_apart(axes, progress.denominator.numbers())) is not None:
        name, own, low, high = divisor
        raise RanksApart(
            f"{apart} the gradients' {name} is {own:g} here, and {low:g} to {high:g} on all ranks. Give "
            "set_gradient_denominator, or load_scaler_state, the same on every rank, such as the tokens of the whole "
            "global batch."
        )
    for axis in axes.with_experts:
        last = [*axes.along(axis).trail][-TRAIL:]
        trail = [-1] * (TRAIL - len(last)) + last
        for theirs in axes.rows(torch.tensor(trail, device=HOST)).tolist():
            for mine, other in zip(trail, theirs, strict=True):
                if mine != other and min(mine, other) >= 0:
                    label.of_code(mine).check(other, "another rank")
    raise RanksApart(f"The ranks have not run the same some time before {label}. {RUN_THE_SAME}")


def _first_apart(axes: Axes, numbers: Mapping[K, float]) -> tuple[K, float, float, float] | None:
    """The first number that is not the same on all ranks: its key, this rank's, the lowest and the highest.

    Args:
        numbers: under the same keys on every rank, in the same order.
    """
    rows = axes.rows(torch.tensor([*numbers.values()], dtype=torch.float64, device=HOST))
    ranges = zip(numbers.items(), rows.amin(0).tolist(), rows.amax(0).tolist(), strict=True)
    return next(((key, own, low, high) for (key, own), low, high in ranges if low != high), None)
