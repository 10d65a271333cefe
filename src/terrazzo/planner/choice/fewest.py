"""How many devices a model needs: the floor that its states set, and the fewest found on which it really runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from terrazzo.errors import BadInput
from terrazzo.planner.choice.search import search, spread
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.report.frontier import Frontier, Refusal
from terrazzo.planner.report.sizing import Sizing
from terrazzo.planner.setup.build_setup import build_cluster, build_setup, counts_of, shape_of
from terrazzo.planner.setup.request import Request
from terrazzo.planner.timing.calibration import Calibration

__all__ = ["floor_gpus", "min_gpus"]

IN_TURN = 16
"""Numbers of devices that are tried one after the other before larger and larger steps are taken."""


def floor_gpus(state_bytes: float, capacity_bytes: float, other_bytes: float = 0.0) -> int:
    """Fewest devices whose memory, less what states do not explain, holds the states: ceil(S / (C - other)).

    Args:
        other_bytes: activations, gathered weights, buffers and libraries, on each device.
    """
    room = capacity_bytes - other_bytes
    if room <= 0:
        raise BadInput(
            f"{other_bytes / 1e9:.1f} GB of activations and buffers leave no room for states in "
            f"{capacity_bytes / 1e9:.1f} GB, on any number of GPUs. Use a smaller micro-batch, checkpointing, or more "
            "memory."
        )
    return math.ceil(state_bytes / room)


def min_gpus(request: Request, calibration: Calibration | None = None) -> Sizing:
    """The fewest devices, in whole hosts, on which some plan within the request surely fits.

    Searches upwards from the floor; `request.gpus` may bound it by a range. Beyond the first `IN_TURN` numbers of
    devices it goes by halves, as if what fits on some fitted on more. Every number is tried with the least memory that
    the request allows, and only the answer with all that it leaves open.

    Raises:
        BadInput: a request that is impossible on every number, or a device whose memory is not known.
    """
    request = replace(request, model=shape_of(request.model))
    device = build_cluster(request, 1).device
    if device.memory_bytes is None:
        raise BadInput(f"The memory of {device.name} is not known. Give it (--memory-gb).")
    if device.kind == "cpu":  # machines are counted, each with all of its memory
        request = replace(request, gpu=device, memory_bytes=None, reserve_bytes=None)
    states = _state_bytes(request)
    floor = floor_gpus(states, device.memory_bytes)
    lowest = floor if request.strategy is None and not request.offload else 1
    counts = [count for count in counts_of(request, device.per_node) if count >= lowest]
    tried: dict[int, Frontier] = {}

    leanest = replace(request, checkpointing=request.checkpointing or "full")
    impossible: list[BadInput] = []

    def runs(count: int) -> bool:
        try:
            tried[count] = search(replace(leanest, gpus=count), calibration, least_memory=True)
        except BadInput as error:  # of this number alone, where another is possible
            impossible.append(error)
            tried[count] = _none(replace(leanest, gpus=count), str(error))
        memories = [each.memory for each in tried[count].ranked]
        return any(memory.fits if memory.uncounted else memory.fits_surely for memory in memories)

    gpus = _first(counts, runs)
    if tried and len(impossible) == len(tried):
        raise impossible[0]
    possible = [count for count, step in tried.items() if step.is_possible]
    if possible:
        shown = gpus or max(possible)
        tried[shown] = search(replace(request, gpus=shown), calibration)
    steps = tuple(tried[count] for count in sorted(tried))
    expected = next((count for count in sorted(tried) if tried[count].ranked), None)
    return Sizing(floor, states, steps, gpus, expected)


def _none(request: Request, reason: str) -> Frontier:
    """What a search finds on a number of devices on which the request is impossible."""
    assert isinstance(request.gpus, int)
    strategy = "every strategy" if request.plan is None else request.plan.name
    return Frontier(request, (), (), (Refusal(strategy, request.gpus, reason, 0),), 0)


def _first(counts: Sequence[int], runs: Callable[[int], bool]) -> int | None:
    """The first of ascending `counts` that runs: in turn, then among round ones by halves, then between two of them."""
    few, more = counts[:IN_TURN], counts[IN_TURN:]
    first = next((count for count in few if runs(count)), None)
    if first is not None or not more:
        return first
    larger = spread(more)
    if not any(runs(count) for count in larger[-2:]):  # the last one may be a number that no mesh divides
        return None
    position = bisect_left(larger[:-1], True, key=runs)
    start = more.index(larger[position - 1]) + 1 if position else 0
    between = more[start : more.index(larger[position])]
    return (*between, larger[position])[bisect_left(between, True, key=runs)]


def _state_bytes(request: Request) -> float:
    """Bytes of the whole model's states, each split over all of `_MANY` ranks and none held twice.

    Residuals of error feedback are not counted: they are not split, and a rank that is alone has none.
    """
    alone = replace(request, gpus=_MANY, strategy="zero3", tp=None, pp=None, cp=None, ep=None, dp_replicate=None)
    setup = build_setup(replace(alone, global_batch=None))
    return _MANY * sum(term.value for term in state_terms(setup, 0) if term.name != "residuals")


_MANY = 8
"""Ranks enough for weights to be derived from the split master weights, and few enough for padding not to count."""
