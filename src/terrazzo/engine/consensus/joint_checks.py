"""Checks that all ranks pass, or all raise: that each can do its part, and that all have been told the same.

Each rank does its part, and where one fails all raise. There are three ways, for three sets of ranks:

    all_or_none                             the ranks of one model's mesh, those of other replicas too; it may be that
                                            of a dry run: a number is exchanged, and the others are told which rank's
                                            message to read; `counted_or_none` for some of them, and with a count
    terrazzo.exchange.together              all ranks of the default group: the error itself is exchanged
    terrazzo.parallel.pipeline.failures     ranks in the middle of a step, which wait for each other's messages: word is
                                            left in the store, and connections are broken off
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from terrazzo.engine.consensus.first_difference import first_difference
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import BadInput

__all__ = ["all_or_none", "check_alike", "counted_or_none"]

T = TypeVar("T")


def all_or_none(axes: Axes, action: Callable[[], T]) -> T:
    """Return what `action` does, if it succeeds on all ranks. Collective.

    Raises:
        Exception: what it raises here.
        BadInput: where it raises on another rank.
    """
    return counted_or_none(axes, action, lambda _: 0, axes.whole_mesh).result


class Counted(NamedTuple, Generic[T]):
    """What an action has returned here, and the least and the greatest count of what it has on any rank."""

    result: T
    least: int
    greatest: int


def counted_or_none(axes: Axes, action: Callable[[], T], count: Callable[[T], int], along: Iterable[str]) -> Counted[T]:
    """As `all_or_none`, of the ranks along some axes, which compare a count of what it returns. Collective.

    Raises:
        Exception: what it raises here.
        BadInput: where it raises on another rank.
    """
    problem, own = None, 0
    try:
        own = count(result := action())
    except Exception as error:
        problem = error
    numbers = torch.tensor([0 if problem is None else dist.get_rank() + 1, own, -own], device=HOST)
    failed, greatest, negated = axes.maximum(numbers, along).tolist()
    if problem is not None:
        raise problem
    if failed:
        raise BadInput(f"Rank {failed - 1} cannot do its part of this: its own message has the edit.")
    return Counted(result, -negated, greatest)


def check_alike(
    axes: Axes,
    facts: Mapping[str, object],
    along: Iterable[str],
    fix: str = "Give every rank the same model and arguments.",
) -> None:
    """Compare what each rank was told. Collective.

    Args:
        facts: the same keys on every rank; values that JSON can hold or `str` can tell apart.
        along: the axes whose ranks are compared.
        fix: what the message ends with.

    Raises:
        BadInput: on every rank of the mesh, naming the facts that differ where they do, and the first such value with
            the ranks that have it.
    """
    along = tuple(along)
    differing = axes.differing(facts, along)
    apart = bool(differing)
    if axes.live(axes.stage_axis):  # else all have been compared
        apart = axes.anywhere(apart, axes.whole_mesh)
    if differing:
        where = [first_difference(axes, {key: facts[key]}, along) for key in differing[:3]]
        raise BadInput(f"The ranks were told different things about: {', '.join(differing)}. {', '.join(where)}. {fix}")
    if apart:
        raise BadInput(
            f"Ranks with another stage of the model were told different things: their message says what. {fix}"
        )
