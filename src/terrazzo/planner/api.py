"""The planner's face: `ask` answers a request, `compare` its search alone, and `plan` is `tz.plan`.

`in_framework` has an answer of another kind told of a framework too, as `ask` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.planner.assemble import estimate
from terrazzo.planner.choice.fewest import min_gpus
from terrazzo.planner.choice.request_changes import edits_that_fit, no_edit, wider_edits
from terrazzo.planner.choice.search import search
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.report.answer import Answer
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.planner.report.sizing import Sizing
from terrazzo.planner.setup.assumptions import assumptions
from terrazzo.planner.setup.build_setup import MOST_TRIED, build_setup
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.request import ModelSource, Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration, find_calibration

__all__ = ["ask", "compare", "in_framework", "plan"]


DEFAULTS = {field.name: field.default for field in fields(Request)}
OF_SEARCHES = ("parallel", "rank_by")
OF_ACTIVATIONS = ("sequence", "micro_batch", "checkpointing", "loss", "attention", "compile")
"""Options that mean something to a search alone, and beside a model whose blocks are known."""

OF_AXES = {"context": "cp", "pipeline": "pp", "sequence_parallel": "tp", "tensor_overlap": "tp"}
"""Options that say how ranks along an axis work together, with that axis."""


def ask(request: Request, *, fewest: bool = False) -> Answer:
    """What a request takes; on one number of devices with what `terrazzo plan --calibrate` measured on as many before.

    One plan where the strategy and the number of devices are named, and no axis is left open by `parallel`; else all
    choices that are open are compared.

    Args:
        fewest: look for the least number of devices on which it runs.

    Raises:
        BadInput: impossible input, and options that say nothing of what is asked.
    """
    if fewest:
        if isinstance(request.gpus, int):
            raise BadInput(
                f"gpus is {request.gpus}, and the fewest are looked for (--min-gpus): give a range, such as "
                f"1..{request.gpus}, or leave one of the two out."
            )
        _check_open(request)
        sizing = min_gpus(request)
        _check_steps(request, sizing)
        if sizing.gpus is None and not request.parallel and sizing.possible:
            sizing = replace(sizing, parallel=min_gpus(replace(request, parallel=True)).gpus)
        found = sizing.answer or (sizing.possible or sizing.steps)[-1]
        return Answer(found.detailed(), _estimate_here, found, sizing)
    if _names_one(request):
        return Answer(_one(request), _estimate_here)
    found = compare(request)
    return Answer(found.detailed(), _estimate_here, found)


def in_framework(answer: Answer, framework: Framework) -> Answer:
    """The answer with what is known in that framework against `best`, which was made for another."""
    known = findings(replace(answer.best.setup, framework=framework))
    return replace(answer, best=replace(answer.best, findings=known))


def compare(request: Request) -> Frontier:
    """The search of `ask` alone, which may have found nothing, but for edits with which it finds something.

    Raises:
        BadInput: as `ask` does.
    """
    _check_open(request)
    found = search(request, _calibration_of(request))
    if found.closest is None:
        return found
    edits = wider_edits(request, found.closest, lambda changed: search(changed, _calibration_of(changed)).best)
    return replace(found, closest=replace(found.closest, edits=edits))


def plan(
    model: ModelSource, gpus: int | str | None = None, *, strategy: str | Plan | None = None, **options: Any
) -> Estimate | Frontier:
    """What running `model` on `gpus` devices takes, from its shapes alone.

    Args:
        model: preset such as `llama3-8b`, path of a config.json or its folder, module on meta, or number of parameters.
        gpus: devices in all, or a range such as `"8..1024"`.
        strategy: such as `zero3`; the answer is then one `Estimate`. Without it, with a range of devices, or with
            `parallel`, all choices that are open are compared: a `Frontier`.
        options: further fields of `Request`: `gpu`, `sequence`, `micro_batch`, `checkpointing`, `tp`, ...

    On one number of devices, what `terrazzo plan --calibrate` measured on as many such before counts.

    Raises:
        BadInput: unknown options, impossible input, and options that say nothing of what is asked.
    """
    known = [field.name for field in fields(Request)]
    for name in options:
        if name not in known:
            raise BadInput(f"tz.plan has no option {name!r}.{did_you_mean(name, known)} Options: {', '.join(known)}.")
    request = Request(model, gpus, strategy=strategy, **options)
    return ask(request).best if _names_one(request) else compare(request)


def _names_one(request: Request) -> bool:
    axes_are_open = request.parallel and request.gpus is not None
    return request.plan is not None and not isinstance(request.gpus, str) and not axes_are_open


def _one(request: Request) -> Estimate:
    _check_open(request)
    if _named_options(request, OF_SEARCHES):
        ignored = [f"{name} (--{name.replace('_', '-')})" for name in OF_SEARCHES if _named_options(request, [name])]
        one = "one strategy on one mesh is a single plan" if isinstance(request.gpus, int) else "no GPUs are named"
        raise BadInput(
            f"{' and '.join(ignored)}: that is for a search, and {one}. Leave it out, leave the strategy open, or give "
            "a range of GPUs such as 8..64."
        )
    only = _estimate_here(build_setup(request))
    if only.setup.micro_batches == 1 and (ignored := _named_options(request, ["accumulate_locally"])):
        raise BadInput(
            f"{ignored[0]}: that is of micro-batches before the last, and a step has one. Leave it out, or give a "
            "global batch or a number of micro-batches."
        )
    if "device" not in only.setup.plan.optim.shares and (ignored := _named_options(request, ["optimizer_kernel"])):
        raise BadInput(
            f"{ignored[0]}: that is of states on the device, and {only.setup.plan.name} updates all of them on the "
            "host, by kernels of its own. Leave it out."
        )
    notes = (*assumptions(request, only.setup), *only.notes)
    if only.memory.fits is not False:
        return replace(only, notes=notes)
    edits = edits_that_fit(request, only, lambda changed: _estimate_here(build_setup(changed)))
    return replace(only, edits=edits, notes=notes if edits else (no_edit(only.setup), *notes))


def _estimate_here(setup: Setup) -> Estimate:
    """`estimate` with what was measured on such devices before, or a warning why a record of that does not count."""
    record, note = find_calibration(setup)
    here = estimate(setup, record)
    return replace(here, notes=(*here.notes, note)) if note else here


def _calibration_of(request: Request) -> Calibration | None:
    """What was measured on as many such devices before; None for a range of numbers, and where nothing was."""
    if not isinstance(request.gpus, int):
        return None
    try:
        return find_calibration(build_setup(request)).record
    except BadInput:  # what is open in the request has to be chosen first
        return None


def _named_options(request: Request, names: Iterable[str]) -> list[str]:
    return [f"{name}={value!r}" for name in names if (value := getattr(request, name)) != DEFAULTS[name]]


def _check_steps(request: Request, sizing: Sizing) -> None:
    if not sizing.steps:
        raise BadInput(
            f"The model states alone need {sizing.floor:,} GPUs, and --gpus {request.gpus or f'1..{MOST_TRIED}'} does "
            "not reach that: allow more, or name a larger GPU."
        )


def _check_open(request: Request) -> None:
    """Raises `BadInput` for what says nothing of what is asked, and for two strategies."""
    _check_axes(request)
    if isinstance(request.model, int | float) and (ignored := _named_options(request, OF_ACTIVATIONS)):
        raise BadInput(
            f"{' and '.join(ignored)}: of a bare number of parameters model states alone are counted. Leave it out, or "
            "name a model, such as llama3-8b or a config.json."
        )
    if request.offload and request.plan is not None:
        name = request.plan.name
        raise BadInput(
            f"offload=True leaves the tier to a search, and the strategy {name} was named: name it with its tier, such "
            f"as {name.partition('@')[0]}@cpu, or leave one of the two out."
        )


def _check_axes(request: Request) -> None:
    """Raises `BadInput` for what would change nothing, since the axis that it is about has one rank."""
    about = OF_AXES | ({"loss": "tp"} if request.loss == "parts" else {})
    for name in [] if request.parallel else about:
        axis, chosen = about[name], _named_options(request, [name])
        if chosen and (getattr(request, axis) or 1) == 1:
            raise BadInput(
                f"{chosen[0]} says how ranks along {axis} work together, and {axis} is 1. Leave it out, or give {axis} "
                "of 2 or more."
            )
