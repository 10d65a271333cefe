"""Compares what ranks were given for a step, before any of them begins to work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from terrazzo.engine import Engine
from terrazzo.engine.consensus.joint_checks import counted_or_none
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart
from terrazzo.parallel.input_fingerprints import (
    DRAWN_BY_DATA_RANK,
    compares_values,
    form_fingerprint,
    inputs_as_text,
    values_fingerprint,
)
from terrazzo.parallel.pipeline.stage_links import StageLinks, exchanges_inside

__all__ = ["StepArguments", "compare_counts", "compare_stages"]


@dataclass(frozen=True)
class StepArguments:
    """What `tz.step` was given on this rank.

    Attributes:
        inputs: of the micro-batches, those by name as dicts.
        denominator: of gradient sums, from now on.
        has_auxiliary: whether modules are asked for losses of their own.
    """

    inputs: Sequence[Any]
    denominator: float
    has_auxiliary: bool


def compare_stages(axes: Axes, links: StageLinks, read: Callable[[], StepArguments]) -> StepArguments:
    """Compare what ranks were given, and drop messages of earlier steps that were abandoned. Collective over the mesh.

    Ranks along `pp` must have the same inputs, the others as many micro-batches. Values are compared in each step
    where they are in host memory, and else in the first step, as the host waits for them.

    Args:
        read: returns what this rank was given, or raises what it refuses.

    Returns:
        What `read` has returned.

    Raises:
        RanksApart: where they differ.
        Exception: what `read` raises here, or on the first rank that refuses.
    """
    messages, failures = links
    problem, own = None, StepArguments((), 1.0, False)
    failures.begin()
    try:
        own = read()
    except Exception as error:
        problem = error
        failures.leave(error)
    looks = compares_values(axes.device, messages.values_compared)
    rows = [_row(inputs, looks) for inputs in own.inputs]
    (low,), (high,) = _ends(axes, [form_fingerprint(rows)])
    numbers = [len(rows), int(torch.is_grad_enabled()), own.denominator, int(own.has_auxiliary)]
    negated = [-each for each in numbers]  # their greatest are the least numbers
    *greatest, any_apart, given_up = failures.meet([*numbers, *negated, int(low != high), messages.given_up], problem)
    messages.begin(int(given_up))
    most, least = greatest[: len(numbers)], [-each for each in greatest[len(numbers) :]]
    differences = _differing(own, least, most)
    if any_apart and not differences:  # as many everywhere: their forms and values can be compared
        differences = (
            _differing_inputs(axes, own, rows) if low != high else ["other inputs for the same data elsewhere"]
        )
    if differences:
        raise RanksApart(
            "The stages of a pipeline have not been told the same. On the mesh's ranks tz.step was given "
            f"{', and '.join(differences)}. Give those along pp the same inputs, and all of them as much: batches are "
            f"{DRAWN_BY_DATA_RANK}"
        )
    messages.values_compared = True
    return own


def compare_counts(model: nn.Module, engine: Engine, read: Callable[[], StepArguments]) -> None:
    """Refuse different numbers of micro-batches on ranks of a model without stages, where each micro-batch exchanges.

    Collective over the mesh in that case.

    Args:
        read: returns what this rank was given, or raises what it refuses.

    Raises:
        RanksApart: on every rank.
        Exception: what `read` raises here.
        BadInput: where it raises on another rank of those that exchange.
    """
    sums = torch.is_grad_enabled() and engine.sharding.fate_of(last=False) is GradientFate.REDUCED
    if not (sums or exchanges_inside(model, engine)):
        read()
        return
    given = counted_or_none(engine.axes, read, lambda arguments: len(arguments.inputs), engine.axes.within_stage)
    if given.least != given.greatest:
        raise RanksApart(
            f"tz.step was given from {given.least} to {given.greatest} micro-batches on the mesh's ranks (here "
            f"{len(given.result.inputs)}), and under this plan ranks exchange in each. Give every rank as many; or "
            "take a plan that splits neither weights nor gradients, such as zero1, under which the last one alone is "
            "summed."
        )


def _row(inputs: Any, looks: bool) -> tuple[int, int]:
    return form_fingerprint(inputs), values_fingerprint(inputs) if looks else 0


def _ends(axes: Axes, numbers: Sequence[float]) -> tuple[list[float], list[float]]:
    """The least and the greatest of each number along `pp`. Collective."""
    own = torch.tensor(numbers, dtype=torch.float64, device=HOST)
    most, least = axes.maximum(torch.stack([own, -own]), axes.stage_axis)
    return (-least).tolist(), most.tolist()


def _differing(own: StepArguments, least: Sequence[float], most: Sequence[float]) -> list[str]:
    texts = [
        f"from {least[0]:g} to {most[0]:g} micro-batches (here {len(own.inputs)})",
        f"gradients enabled on some and disabled on others (here {'en' if torch.is_grad_enabled() else 'dis'}abled)",
        f"denominators from {least[2]:g} to {most[2]:g} (here {own.denominator:g})",
        f"'auxiliary' on some and none on others (here {'one' if own.has_auxiliary else 'none'})",
    ]
    return [text for text, low, high in zip(texts, least, most, strict=True) if low != high]


def _differing_inputs(axes: Axes, own: StepArguments, rows: Sequence[tuple[int, int]]) -> list[str]:
    """The first micro-batch whose inputs are not the same. Collective along `pp`: all have as many."""
    least, most = _ends(axes, [number for row in rows for number in row])
    for place, (low, high) in enumerate(zip(least, most, strict=True)):
        if low != high:
            number, what = place // 2 + 1, "other values" if place % 2 else "another form"
            text = inputs_as_text(own.inputs[place // 2])
            return [f"inputs of {what} for micro-batch {number} of {len(rows)} (here {text})"]
    return []
