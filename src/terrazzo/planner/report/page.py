"""One HTML file of an answer: memory, speed and cost of every setup, and of what changes when it is run otherwise.

All figures are computed here; the page, whose template is `page.html`, only draws them and loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.report.bars import KINDS, parts_of
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.planner.report.words import axes_text, blocker, checkpointing_text, count_text, setup_text, verdict
from terrazzo.planner.setup.build_setup import build_setup, request_of
from terrazzo.planner.setup.choice_names import TRIED_MODES
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["page"]

TEMPLATE, PLACE = "page.html", "/*PLAN*/null"
TOKENS_PER_PARAMETER = 20
"""Tokens of the budget that is shown first, for each parameter (arXiv 2203.15556)."""

SLIDER_SIZES = (1, 2, 4, 8, 16)
SEQUENCE_FACTORS = (0.25, 0.5, 1, 2, 4)
GPU_FACTORS = (0.5, 1, 2, 4, 8)
"""What sliders offer beside the setup's own: sizes, and multiples."""


@dataclass(frozen=True)
class _Slider:
    """A field of the request, and the values that it may be given."""

    name: str
    field: str
    values: tuple[Any, ...]
    start: int

    def labels(self) -> list[str]:
        return [f"{value:,}" if isinstance(value, int) else str(value) for value in self.values]


def page(best: Estimate, request: Request, frontier: Frontier | None, estimate: Callable[[Setup], Estimate]) -> str:
    """The HTML.

    Args:
        best: what it opens with.
        request: what was asked, of which sliders change one field each.
        frontier: what it is compared with; None: nothing.
    """
    setup = best.setup
    chosen = request_of(request, setup)
    sliders = _sliders(chosen, setup)
    plans = list(frontier.ranked) if frontier else []
    pareto = {id(each) for each in frontier.pareto} if frontier else set()
    first, *rest = setup_text(setup).splitlines()
    document = {
        "title": f"{setup.model.name} on {setup.cluster.count} × {setup.cluster.device.name}",
        "subtitle": f"{first.partition(', ')[2]}. {' '.join(rest)}.",
        "verdict": verdict(best.memory),
        "blocker": blocker(best.memory),
        "fits": best.memory.fits,
        "capacity": None if best.memory.capacity_bytes is None else _gib(best.memory.capacity_bytes),
        "kinds": [kind.name for kind in KINDS],
        "sliders": [
            {"name": each.name, "values": list(each.values), "labels": each.labels(), "start": each.start}
            for each in sliders
        ],
        "grid": [_varied(chosen, sliders, values, best, estimate) for values in product(*(s.values for s in sliders))],
        "plans": [_shown(each) | {"pareto": id(each) in pareto} for each in plans],
        "best": next((index for index, each in enumerate(plans) if each.setup == setup), None),
        "considered": frontier.considered if frontier else 1,
        "refused": _refused(frontier) if frontier else [],
        "edits": [[each.options, _figures(each.estimate), each.cost] for each in best.edits],
        "tokens": count_text(TOKENS_PER_PARAMETER * setup.model.numel).replace(" ", ""),
        "price": request.price_per_hour,
    }
    _number_findings(document)
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = files("terrazzo.planner.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return template.replace(PLACE, data)


def _sliders(chosen: Request, setup: Setup) -> list[_Slider]:
    count, sequence = setup.cluster.count, setup.sequence
    modes = (*TRIED_MODES, *({chosen.checkpointing or "none"} - set(TRIED_MODES)))
    made: list[tuple[str, str, tuple[Any, ...]]] = [
        ("GPUs", "gpus", _times(count, GPU_FACTORS, setup.mesh.world_size // setup.mesh.batch_ranks))
    ]
    if setup.model.computes:
        sizes = tuple(sorted({*SLIDER_SIZES, setup.micro_batch}))
        made = [
            ("micro-batch", "micro_batch", sizes),
            ("tokens of a sequence", "sequence", _times(sequence, SEQUENCE_FACTORS, 1)),
            ("activation checkpointing", "checkpointing", modes),
            *made,
        ]
    own: dict[str, Any] = {"gpus": count, "micro_batch": setup.micro_batch, "sequence": sequence}
    own |= {"checkpointing": chosen.checkpointing}
    return [_Slider(name, field, values, values.index(own[field])) for name, field, values in made]


def _times(value: int, factors: Sequence[float], least: int) -> tuple[int, ...]:
    """Whole multiples and parts of a number that are `least` or more."""
    return tuple(int(value * each) for each in factors if value * each == int(value * each) >= least)


def _varied(
    chosen: Request,
    sliders: Sequence[_Slider],
    values: Sequence[Any],
    best: Estimate,
    estimate: Callable[[Setup], Estimate],
) -> dict[str, Any]:
    """What the setup takes with other values of some fields, or why it cannot be."""
    changes = {slider.field: value for slider, value in zip(sliders, values, strict=True)}
    if all(slider.values[slider.start] == value for slider, value in zip(sliders, values, strict=True)):
        return _figures(best)
    try:
        return _figures(estimate(build_setup(replace(chosen, **changes))))
    except BadInput as error:
        return {"problem": str(error)}


def _refused(frontier: Frontier) -> list[list[str]]:
    """Each reason once, behind the strategies that it is about."""
    reasons: dict[str, list[str]] = {}
    for each in frontier.refused:
        names = reasons.setdefault(each.reason.removeprefix(f"{each.strategy} "), [])
        if each.strategy not in names:
            names.append(each.strategy)
    return [[", ".join(names), reason] for reason, names in reasons.items()]


def _shown(estimate: Estimate) -> dict[str, Any]:
    setup = estimate.setup
    mesh, mode = axes_text(setup), checkpointing_text(setup)
    return _figures(estimate) | {
        "name": f"{setup.plan.name} on {mesh}, checkpointing {mode}, micro-batch {setup.micro_batch}",
        "strategy": setup.plan.name,
        "mesh": mesh,
        "checkpointing": mode,
        "micro": f"{setup.micro_batch} × {setup.micro_batches}",
    }


def _figures(estimate: Estimate) -> dict[str, Any]:
    setup, memory, time = estimate.setup, estimate.memory, estimate.time
    return {
        "gib": _gib(memory.expected_bytes),
        "upper": _gib(memory.most_bytes),
        "parts": _parts(memory),
        "fits": memory.fits,
        "surely": bool(memory.fits_surely),
        "blocker": blocker(memory),
        "speed": _short(time.tokens_per_s_per_gpu) if time else None,
        "step": _short(time.step_s) if time else None,
        "mfu": _short(time.mfu) if time and time.mfu is not None else None,
        "bound": time.bound_by if time else None,
        "gpus": setup.cluster.count,
        "batch": setup.global_batch,
        "tokens": setup.global_batch * setup.sequence,
        "findings": [*map(str, estimate.findings)],
    }


def _number_findings(document: dict[str, Any]) -> None:
    """Have each finding once, and its number where it is raised: hundreds of places on sliders share a few."""
    figures = [*document["grid"], *document["plans"], *(edit[1] for edit in document["edits"])]
    texts = dict.fromkeys(text for each in figures for text in each.get("findings", ()))
    document["findings"] = list(texts)
    numbers = {text: number for number, text in enumerate(texts)}
    for each in figures:
        if "findings" in each:
            each["findings"] = [numbers[text] for text in each["findings"]]


def _parts(memory: MemoryFigures) -> list[float]:
    """GiB of each kind, in the order of `KINDS`."""
    parts = parts_of(memory)
    return [_gib(parts.get(kind.name, 0.0)) for kind in KINDS]


def _gib(value: float) -> float:
    return _short(value / GIB)


def _short(value: float) -> float:
    """The number with as many digits as anyone reads."""
    return float(f"{value:.5g}")
