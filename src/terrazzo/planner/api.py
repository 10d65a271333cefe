"""The planner's front doors: one setup estimated, and what `tz.plan` answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from terrazzo.engine import Plan
from terrazzo.errors import BadInput, did_you_mean
from terrazzo.planner.assemble import Estimate, estimate
from terrazzo.planner.choice.frontier import Frontier
from terrazzo.planner.choice.search import search
from terrazzo.planner.setup.request import Model, Request, assumptions, build_setup
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration, find_calibration

__all__ = [
    "assumed",
    "calibration_of",
    "estimate",
    "estimate_asked",
    "estimate_here",
    "estimate_request",
    "plan",
]


DEFAULTS = {field.name: field.default for field in fields(Request)}
OF_SEARCHES = ("parallel", "rank")
OF_ACTIVATIONS = ("sequence", "micro_batch", "checkpointing", "loss", "attention", "compile")
"""Options that mean something to a search alone, and beside a model whose blocks are known."""


def estimate_here(setup: Setup) -> Estimate:
    """`estimate` with what was measured on such devices before, or a warning why a record of that does not count."""
    record, note = find_calibration(setup)
    found = estimate(setup, record)
    return replace(found, notes=(*found.notes, note)) if note else found


def calibration_of(request: Request) -> Calibration | None:
    """What was measured on as many such devices before; None for a range of numbers, and where nothing was."""
    if not isinstance(request.gpus, int):
        return None
    try:
        return find_calibration(build_setup(request))[0]
    except BadInput:  # what is open in the request has to be chosen first
        return None


def estimate_request(request: Request, calibration: Calibration | None = None) -> Estimate:
    """`estimate` of what a request means; its warnings begin with what was assumed."""
    _check_one(request)
    return assumed(request, estimate(build_setup(request), calibration))


def estimate_asked(request: Request) -> Estimate:
    """As `estimate_request`, with what was measured on such devices before.

    Raises:
        BadInput: impossible input, or options that mean something to a search alone.
    """
    _check_one(request)
    return assumed(request, estimate_here(build_setup(request)))


def assumed(request: Request, found: Estimate) -> Estimate:
    """With a note of everything that the request left open."""
    return replace(found, notes=assumptions(request, found.setup) + found.notes)


def plan(
    model: Model, gpus: int | str | None = None, *, strategy: str | Plan | None = None, **options: Any
) -> Estimate | Frontier:
    """What running `model` on `gpus` devices takes, from its shapes alone.

    Args:
        model: preset such as `llama3-8b`, path of a config.json or its folder, module on meta, or number of parameters.
        gpus: devices in all, or a range such as `"8..1024"`.
        strategy: such as `zero3`; the answer is then one `Estimate`. Without it, or with a range of devices, all
            choices that are open are compared: a `Frontier`.
        options: further fields of `Request`: `gpu`, `sequence`, `micro_batch`, `checkpointing`, `tp`, ...

    What `terrazzo plan --calibrate` measured on such devices before counts.

    Raises:
        BadInput: unknown options, impossible input, and options that say nothing of what is asked.
    """
    known = [field.name for field in fields(Request)]
    for name in options:
        if name not in known:
            raise BadInput(f"tz.plan has no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}.")
    request = Request(model, gpus, strategy=strategy, **options)
    _check_count(request)
    if strategy is not None and not isinstance(request.gpus, str):
        return estimate_asked(request)
    _check_tier(request)
    return search(request, calibration_of(request))


def _given(request: Request, names: Iterable[str]) -> list[str]:
    return [f"{name}={value!r}" for name in names if (value := getattr(request, name)) != DEFAULTS[name]]


def _check_one(request: Request) -> None:
    """Raises `BadInput` for what a search would look at, and one plan does not."""
    _check_tier(request)
    if ignored := _given(request, OF_SEARCHES):
        raise BadInput(
            f"{' and '.join(ignored)}: that is for a search, and one strategy on one number of GPUs is a single plan. "
            "Leave it out, leave the strategy open, or give a range of GPUs such as 8..64."
        )


def _check_tier(request: Request) -> None:
    if request.offload and request.plan is not None:
        name = request.plan.name
        raise BadInput(
            f"offload=True leaves the tier to a search, and the strategy {name} was named: name it with its tier, such "
            f"as {name.partition('@')[0]}@cpu, or leave one of the two out."
        )


def _check_count(request: Request) -> None:
    """Raises `BadInput` for what says nothing about a bare number of parameters."""
    if isinstance(request.model, int | float) and (ignored := _given(request, OF_ACTIVATIONS)):
        raise BadInput(
            f"{' and '.join(ignored)}: of a bare number of parameters model states alone are counted. Leave it out, or "
            "name a model, such as llama3-8b or a config.json."
        )
