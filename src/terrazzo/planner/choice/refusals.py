"""Why what a search tried does not run: counted by strategy and number of devices, with the one that comes nearest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Refusal
from terrazzo.planner.report.words import HOSTS, LABELS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["Refusals", "fits_without_sums", "states_too_large", "too_large"]

SUMS = ("unreduced", "sums")
"""Terms, of the device's memory and the host's, that are there in a step of several micro-batches alone."""

KEPT_BESIDE = 0.1
"""At most what the allocator keeps beside these, as a share of them."""


class Refusals:
    """Collects what is refused: of each strategy on each number of devices how many, and the nearest miss."""

    def __init__(self) -> None:
        self._nearest: dict[tuple[str, int], Refusal] = {}

    @property
    def candidates(self) -> int:
        """How many were refused."""
        return sum(each.candidates for each in self._nearest.values())

    def add(
        self,
        choice: Request,
        reason: str,
        candidates: int = 1,
        too_large: tuple[Setup, MemoryFigures] | None = None,
    ) -> None:
        """Refuse a choice, which stands for so many candidates.

        Args:
            too_large: where memory is the reason, the setup that it is too large for, and what that takes.
        """
        assert isinstance(choice.gpus, int)
        assert choice.plan is not None
        setup, memory = too_large or (None, None)
        needed_bytes = None if memory is None else memory.expected_bytes
        refusal = Refusal(choice.plan.name, choice.gpus, reason, candidates, needed_bytes, setup, memory)
        key = (refusal.strategy, refusal.gpus)
        if known := self._nearest.get(key):
            nearest = min(known, refusal, key=lambda one: one.overrun)
            refusal = replace(nearest, candidates=known.candidates + candidates)
        self._nearest[key] = refusal

    def beside(self, fitting: Iterable[Estimate]) -> tuple[Refusal, ...]:
        """The strategies of which nothing fits, by number of devices, what lacks least first; what memory is no reason
        for comes last.
        """
        fit = {(each.setup.plan.name, each.setup.cluster.count) for each in fitting}
        refused = [refusal for key, refusal in self._nearest.items() if key not in fit]
        return tuple(sorted(refused, key=lambda refusal: (refusal.gpus, refusal.overrun)))


def states_too_large(needed_bytes: float, capacity_bytes: float) -> str:
    """Why nothing of a strategy fits whose states alone do not."""
    needed, capacity = _gib(needed_bytes), _gib(capacity_bytes)
    return f"weights, gradients and optimizer alone need {needed} GiB; the device has {capacity}."


def too_large(setup: Setup, memory: MemoryFigures) -> str:
    """Why a setup does not fit on the device, its host or its disks; empty where it does."""
    if memory.fits is not False:
        return ""
    full = memory.overfull[0]
    largest, mode = max(full.terms, key=lambda term: term.value), setup.checkpointing_name
    label = LABELS.get(largest.name, largest.name)
    numbers = f"{_gib(full.expected)} of {_gib(full.capacity or 0)} GiB"
    if full.name != "device":
        amount = _gib(memory.ranks_per_host * largest.value)
        return f"the {HOSTS[full.name]} of each host would hold {numbers}, of which {amount} {label}."
    with_mode = "" if mode == "none" else f" and {mode} activation checkpointing"
    which = f"of which {_gib(largest.value)} {label}"
    return f"with micro-batch {setup.micro_batch}{with_mode}, {numbers} are expected, {which}."


def fits_without_sums(memory: MemoryFigures) -> bool:
    """Whether what is too large would fit if no gradients were added up over micro-batches."""
    full = memory.overfull[0]
    sums = sum(term.value for term in full.terms if term.name in SUMS)
    return 0 < full.expected - (full.capacity or 0) < (1 + KEPT_BESIDE) * sums


def _gib(value: float) -> str:
    gib = value / GIB
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}"
