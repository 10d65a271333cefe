"""Where ranks meet at the end of a pass: to hear who still needs what, and to notice if they have not run the same."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence

import torch

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.links.collectives import TRAIL
from terrazzo.engine.links.label import RUN_THE_SAME, Label, moving
from terrazzo.engine.loop.progress import Progress
from terrazzo.engine.plan.axes import Axes
from terrazzo.errors import RanksApart

__all__ = ["MEETING_NUMEL", "meet", "weights_are_split"]

MEETING_NUMEL = 4
"""int64 elements that each meeting exchanges over every axis, besides its numbers."""


def weights_are_split(units: Iterable[Unit]) -> bool:
    """Whether weights at rest are, so that a rank can need those of another in the middle of a pass."""
    return any(bucket.weight_axes for unit in units for bucket in unit.buckets)


def meet(axes: Axes, progress: Progress, label: Label, numbers: Sequence[int]) -> list[int]:
    """The elementwise maximum of the `numbers` of all ranks, which meet at `label`; blocks.

    Raises:
        RanksApart: if another rank has come with another label, or has issued other exchanges than this one on a
            transport whose messages carry no labels.
    """
    trail = _trail(axes, progress)
    values = torch.tensor([label.code, ~label.code, trail, ~trail, *numbers], device=axes.control_device)
    before = moving.set(label)
    try:
        highest, lowest, most, least, *top = axes.maximum(values).tolist()
    finally:
        moving.reset(before)
    label.check(highest, "another rank")
    label.check(~lowest, "another rank")
    if most != ~least:
        _compare_trails(axes, progress, label)
    return [int(number) for number in top]


def _trail(axes: Axes, progress: Progress) -> int:
    """A checksum of what must be equal on all ranks: optimizer steps and their hyper-parameters, what the loop has
    done to gradients, what they are multiplied and divided by, and what has been exchanged on transports whose
    messages carry no labels.
    """
    checksum = zlib.crc32(struct.pack("<qq", progress.steps, progress.edits))
    numbers = [*_hyper_parameters(progress).values(), *progress.denominator.numbers().values()]
    checksum = zlib.crc32(array("d", numbers).tobytes(), checksum)
    for axis in axes.exchanging:
        checksum = zlib.crc32(axes.along(axis).checksum.to_bytes(4, "little"), checksum)
    return checksum


def _hyper_parameters(progress: Progress) -> dict[tuple[int, str], float]:
    return {(first, name): value for first, held in progress.hyper_parameters.items() for name, value in held.items()}


def _compare_trails(axes: Axes, progress: Progress, label: Label) -> None:
    """The trails of the ranks differ.

    Raises:
        RanksApart: naming steps, gradients, hyper-parameters, denominators, or the first exchange in which they do.
    """
    own_steps = progress.steps
    steps = axes.rows(torch.tensor([own_steps], device=axes.control_device)).flatten().tolist()
    if min(steps) != max(steps):
        raise RanksApart(
            f"The ranks have not run the same: before {label}, optimizer.step() has been called {own_steps} times "
            f"here, and from {min(steps)} to {max(steps)} times on all ranks. Every rank must step, or none: agree "
            "on it, for example with an all_reduce of whether the loss is finite."
        )
    edits = axes.rows(torch.tensor([progress.edits], device=axes.control_device)).flatten().tolist()
    if min(edits) != max(edits):
        raise RanksApart(
            f"The ranks have not run the same: before {label}, gradients have been forgotten or changed on some ranks "
            f"and not on others, or by other numbers; what was done last here: {progress.last_edit}. Each rank steps "
            "its own part of the weights: call zero_grad(), set .grad to None, scale and clip on every rank or on none."
        )
    held = _hyper_parameters(progress)
    rows = axes.rows(torch.tensor([*held.values()], dtype=torch.float64, device=axes.control_device))
    for (_, name), used, each in zip(held, held.values(), rows.T.tolist(), strict=True):
        if min(each) != max(each):
            raise RanksApart(
                f"The ranks have not run the same: before {label}, optimizer.step() has used {name} = {used} here, and "
                f"{min(each)} to {max(each)} on all ranks. Set the same on every rank: give a scheduler that follows a "
                "metric, such as ReduceLROnPlateau, the metric's mean over the ranks."
            )
    divisors = progress.denominator.numbers()
    rows = axes.rows(torch.tensor([*divisors.values()], dtype=torch.float64, device=axes.control_device))
    for (name, used), each in zip(divisors.items(), rows.T.tolist(), strict=True):
        if min(each) != max(each):
            raise RanksApart(
                f"The ranks have not run the same: before {label}, the gradients' {name} is {used:g} here, and "
                f"{min(each):g} to {max(each):g} on all ranks. Give set_gradient_denominator, or load_scaler_state, "
                "the same on every rank, such as the tokens of the whole global batch."
            )
    for axis in axes.exchanging:
        trail = [*axes.along(axis).trail][-TRAIL:]
        own = torch.tensor([-1] * (TRAIL - len(trail)) + trail, device=axes.device)
        for theirs in axes.rows(own).tolist():
            for mine, other in zip(own.tolist(), theirs, strict=True):
                if mine != other and min(mine, other) >= 0:
                    label.of_code(mine).check(other, "another rank")
    raise RanksApart(f"The ranks have not run the same some time before {label}. {RUN_THE_SAME}")
