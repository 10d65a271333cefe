"""That all ranks were given the same step, before any of them begins to work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from terrazzo.engine import Engine
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.bucket_spec import Pass
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import BadInput, RanksApart
from terrazzo.parallel.input_fingerprints import DRAWN_BY_DATA_RANK, described, form_of_inputs, values_of_inputs
from terrazzo.parallel.pipeline.pipeline_step import Ways, exchanges_inside

__all__ = ["Given", "begin_alike", "check_as_many"]


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


def begin_alike(axes: Axes, ways: Ways, given: Callable[[], Given]) -> Given:
    """Compare what ranks were given, and forget what was still under way of steps that were given up.

    Ranks along `pp` were given the same inputs, others as many. Values are compared where the host has not to wait for
    them, and else once. Collective over the whole mesh.

    Args:
        given: what this rank was given; raises what it refuses.

    Returns:
        What that is.

    Raises:
        RanksApart: where they differ.
        Exception: what `given` raises here, or on the first rank that refuses.
    """
    messages, failures = ways
    problem, here = None, Given((), 1.0, False)
    failures.begin()
    try:
        here = given()
    except Exception as error:
        problem = error
        failures.leave(error)
    looks = axes.device.type == HOST.type or not messages.values_compared
    rows = [_row(inputs, looks) for inputs in here.inputs]
    (low,), (high,) = _ends(axes, [form_of_inputs(rows)])
    numbers = [len(rows), int(torch.is_grad_enabled()), here.denominator, int(here.has_auxiliary)]
    told = [*numbers, *(-each for each in numbers), int(low != high), messages.given_up]
    *ends, any_apart, given_up = failures.meet(told, problem)
    messages.begin(int(given_up))
    found = _differing(here, [-each for each in ends[len(numbers) :]], ends)
    if any_apart and not found:  # as many everywhere: their forms and values can be compared
        found = _differing_inputs(axes, here, rows) if low != high else ["other inputs for the same data elsewhere"]
    if found:
        raise RanksApart(
            "The stages of a pipeline have not been told the same. On the mesh's ranks tz.step was given "
            f"{', and '.join(found)}. Give those along pp the same inputs, and all of them as much: batches are "
            f"{DRAWN_BY_DATA_RANK}"
        )
    messages.values_compared = True
    return here


def check_as_many(model: nn.Module, engine: Engine, given: Callable[[], Given]) -> None:
    """Refuse other numbers of micro-batches on some ranks of a model without stages, where each of them exchanges.

    Collective there: over the whole mesh.

    Args:
        given: what this rank was given; raises what it refuses.

    Raises:
        RanksApart: on every rank.
        Exception: what `given` raises here.
        BadInput: where it raises on another rank of those that exchange.
    """
    sums = torch.is_grad_enabled() and engine.sharding.pass_of(False, None) is Pass.REDUCES
    if not (sums or exchanges_inside(model, engine)):
        given()
        return
    problem, count = None, 0
    try:
        count = len(given().inputs)
    except Exception as error:
        problem = error
    told = [count, -count, 0 if problem is None else dist.get_rank() + 1]
    most, least, refusing = engine.axes.maximum(torch.tensor(told, device=HOST)).tolist()
    if problem is not None:
        raise problem
    if refusing:
        raise BadInput(f"Rank {refusing - 1} refuses what tz.step was given there: its own message has the edit.")
    if most != -least:
        raise RanksApart(
            f"tz.step was given from {-least} to {most} micro-batches on the mesh's ranks (here {count}), and under "
            "this plan ranks exchange in each. Give every rank as many; or take a plan that splits neither weights "
            "nor gradients, such as zero1, under which the last one alone is summed."
        )


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
    """The first micro-batch whose inputs are not the same. Collective along `pp`: all have as many."""
    least, most = _ends(axes, [number for row in rows for number in row])
    for place, (low, high) in enumerate(zip(least, most, strict=True)):
        if low != high:
            number, what = place // 2 + 1, "other values" if place % 2 else "another form"
            return [
                f"inputs of {what} for micro-batch {number} of {len(rows)} (here {described(here.inputs[place // 2])})"
            ]
    return []
