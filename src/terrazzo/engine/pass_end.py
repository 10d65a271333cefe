"""Where ranks meet at the end of a pass: to hear who still needs what, and to notice if they have not run the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from terrazzo.engine.axes import Axes
from terrazzo.engine.links.label import Label, moving
from terrazzo.engine.recipe import Recipe

__all__ = ["MEETING_NUMEL", "meet", "meets"]

MEETING_NUMEL = 4
"""int64 elements that each meeting exchanges over every axis, besides its numbers."""


def meets(recipe: Recipe) -> bool:
    """Whether a rank can need another's weights in the middle of a pass."""
    return bool(recipe.plan.weight.axes)


def meet(axes: Axes, label: Label, numbers: Sequence[int]) -> list[int]:
    """Each the highest of the `numbers` of all data ranks, which meet at `label`; blocks.

    Errors: `RanksApart` if another rank has come with another label, or has issued other exchanges than this one on a
    transport whose messages carry no labels.
    """
    trail = axes.trail()
    values = torch.tensor([label.code, ~label.code, trail, ~trail, *numbers], device=axes.control_device)
    before = moving.set(label)
    try:
        highest, lowest, most, least, *top = axes.maximum(values).tolist()
    finally:
        moving.reset(before)
    label.check(highest, "another rank")
    label.check(~lowest, "another rank")
    if most != ~least:
        axes.compare_trails(label)
    return [int(number) for number in top]
