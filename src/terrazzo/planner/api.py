"""The planner's front doors: one setup estimated, and what `tz.plan` answers."""

from __future__ import annotations

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

__all__ = ["assumed", "calibration_of", "estimate", "estimate_here", "estimate_request", "plan"]


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
    return assumed(request, estimate(build_setup(request), calibration))


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
        BadInput: unknown options and impossible input.
    """
    known = [field.name for field in fields(Request)]
    for name in options:
        if name not in known:
            raise BadInput(f"tz.plan has no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}.")
    request = Request(model, gpus, strategy=strategy, **options)
    if strategy is None or isinstance(request.gpus, str):
        return search(request, calibration_of(request))
    return assumed(request, estimate_here(build_setup(request)))
