"""That ranks of all stages were given the same step, before any of them begins to work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.engine.plan.axes import Axes
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart
from terrazzo.parallel.given import DRAWN_BY_DATA_RANK, described, form_of_inputs, values_of_inputs
from terrazzo.parallel.pipeline.messages import Messages

__all__ = ["Given", "begin_alike"]


@dataclass(frozen=True)
class Given:
    """What `tz.step` was given on this rank.

    Attributes:
        inputs: of the micro-batches, those by name as dicts.
        denominator: of gradient sums, from now on.
        has_auxiliary: whether modules are asked for what they have put aside.
    """

    inputs: Sequence[Any]
    denominator: float
    has_auxiliary: bool


def begin_alike(axes: Axes, messages: Messages, given: Callable[[], Given]) -> Given:
    """Compare what ranks along `pp` were given, and forget what was still under way of steps that were given up.

    Values are compared where the host has not to wait for them, and else once. Collective along `pp`.

    Args:
        given: what this rank was given; raises what it refuses.

    Returns:
        What that is.

    Raises:
        RanksApart: where they differ, or another rank refuses.
        Exception: what `given` raises here.
    """
    problem, here = None, Given((), 1.0, False)
    try:
        here = given()
    except Exception as error:
        problem = error
    looks = axes.device.type == HOST.type or not messages.values_compared
    rows = [_row(inputs, looks) for inputs in here.inputs]
    told = [len(rows), torch.is_grad_enabled(), here.denominator, here.has_auxiliary, form_of_inputs(rows)]
    least, most = _ends(axes, [*told, problem is not None, messages.given_up])
    messages.begin(int(most[-1]))
    if problem is not None:
        raise problem
    if most[-2]:
        raise RanksApart("Another rank of the pipeline refuses what tz.step was given: its own message has the edit.")
    if least[:-2] != most[:-2]:
        alike = least[0] == most[0]  # then the forms and values of as many micro-batches can be compared
        found = [*_differing(here, least, most), *(_differing_inputs(axes, here, rows) if alike else ())]
        raise RanksApart(
            "The stages of a pipeline have not been told the same. On the ranks along pp tz.step was given "
            f"{', and '.join(found)}. Give all of them the same: batches are {DRAWN_BY_DATA_RANK}"
        )
    messages.values_compared = True
    return here


def _row(inputs: Any, looks: bool) -> tuple[int, int]:
    return form_of_inputs(inputs), values_of_inputs(inputs) if looks else 0


def _ends(axes: Axes, numbers: Sequence[float]) -> tuple[list[float], list[float]]:
    """The least and the greatest of each number along `pp`. Collective."""
    own = torch.tensor(numbers, dtype=torch.float64, device=HOST)
    most, least = axes.maximum(torch.stack([own, -own]), axes.stages)
    return (-least).tolist(), most.tolist()


def _differing(here: Given, least: Sequence[float], most: Sequence[float]) -> list[str]:
    texts = [
        f"from {least[0]:g} to {most[0]:g} micro-batches (here {len(here.inputs)})",
        f"gradients enabled on some and disabled on others (here {'en' if torch.is_grad_enabled() else 'dis'}abled)",
        f"denominators from {least[2]:g} to {most[2]:g} (here {here.denominator:g})",
        f"'auxiliary' on some and none on others (here {'one' if here.has_auxiliary else 'none'})",
    ]
    return [text for text, low, high in zip(texts, least, most, strict=False) if low != high]


def _differing_inputs(axes: Axes, here: Given, rows: Sequence[tuple[int, int]]) -> list[str]:
    """The first micro-batch whose inputs are not the same. Collective: all have as many."""
    least, most = _ends(axes, [number for row in rows for number in row])
    for place, (low, high) in enumerate(zip(least, most, strict=True)):
        if low != high:
            number, what = place // 2 + 1, "other values" if place % 2 else "another form"
            return [
                f"inputs of {what} for micro-batch {number} of {len(rows)} (here {described(here.inputs[place // 2])})"
            ]
    return []
