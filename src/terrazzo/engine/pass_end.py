"""Where ranks meet at the end of a pass: to hear who still needs what, and to notice if they have not run the same."""

from __future__ import annotations

from collections.abc import Callable

import torch

from terrazzo.engine.axes import Axes
from terrazzo.engine.label import Label, moving
from terrazzo.engine.recipe import Recipe

__all__ = ["MEETING_NUMEL", "meeting_of", "meets"]

MEETING_NUMEL = 5
"""int64 elements that each meeting exchanges over every axis."""


def meets(recipe: Recipe) -> bool:
    """Whether a rank can need another's weights in the middle of a pass."""
    return bool(recipe.plan.weight.axes)


def meeting_of(axes: Axes) -> Callable[[Label, int], int]:
    """A function of a label and a number that gives the highest number of all ranks; blocks.

    Errors, from the function: `RanksApart` if another rank has come with another label, or has issued other exchanges
    than this one on a transport whose messages carry no labels.
    """

    device = axes.control_device

    def meet(label: Label, number: int) -> int:
        trail = axes.trail()
        values = torch.tensor([label.code, ~label.code, trail, ~trail, number], dtype=torch.int64, device=device)
        before = moving.set(label)
        try:
            highest, lowest, most, least, top = axes.maximum(values).tolist()
        finally:
            moving.reset(before)
        label.check(highest, "another rank")
        label.check(~lowest, "another rank")
        if most != ~least:
            axes.compare_trails(label)
        return int(top)

    return meet
