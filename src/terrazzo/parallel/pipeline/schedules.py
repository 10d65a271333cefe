"""In which order each rank of a pipeline runs its stages on the micro-batches of a step: a list of actions as data.

Stages follow one another through the model. With one chunk a rank has one stage; with several, rank r of R has the
stages r, R + r, 2R + r and so on. Within a stage forwards and backwards come in the order of micro-batches, so that
gradients add up as they do in a plain loop. Integers only: no communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from terrazzo.errors import BadInput
from terrazzo.words import check_schedule

__all__ = ["Action", "ActionKind", "actions_of", "balanced", "forwards_of", "rounds_of"]


class ActionKind(StrEnum):
    """What a rank does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    """The gradients of weights that the backward has put off."""


class Action(NamedTuple):
    """One stage runs on one micro-batch."""

    stage: int
    kind: ActionKind
    micro_batch: int


def actions_of(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does, in its order.

    Args:
        ranks: along the pipeline.
        chunks: stages of each rank.

    Raises:
        BadInput: an unknown schedule, or a number of micro-batches that leaves ranks without work or does not go round.
    """
    check_schedule(schedule, chunks)
    if micro_batches < ranks:
        raise BadInput(
            f"A step of {micro_batches} micro-batches does not fill a pipeline of {ranks} ranks, of which some would "
            f"always wait: give at least {ranks} micro-batches (in a run: a larger batch.global_batch, or a smaller "
            "batch.micro_batch), or make the mesh with a smaller pp."
        )
    if schedule == "gpipe":
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if schedule == "zero_bubble":
        return [_zero_bubble(rank, ranks, micro_batches) for rank in range(ranks)]
    if chunks == 1:
        return [_one_by_one(_plain(rank, micro_batches), ranks - 1 - rank) for rank in range(ranks)]
    size = rounds_of(ranks, micro_batches)
    runs = [_interleaved(rank, ranks, chunks, micro_batches, size) for rank in range(ranks)]
    return [_one_by_one(run, (chunks - 1) * size + 2 * (ranks - 1 - rank)) for rank, run in enumerate(runs)]


def rounds_of(ranks: int, micro_batches: int) -> int:
    """How many micro-batches an interleaved pipeline runs through one chunk before the next one does.

    Raises:
        BadInput: a number that makes no rounds of one size.
    """
    rounds = micro_batches // ranks
    if micro_batches % rounds:
        raise BadInput(
            f"An interleaved pipeline of {ranks} ranks runs micro-batches in rounds of {ranks} or a little more, all "
            f"of the same size, which {micro_batches} do not make: give a multiple of {ranks}."
        )
    return micro_batches // rounds


def forwards_of(ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """As `actions_of`, of a pass without backwards: micro-batch after micro-batch, through all stages."""
    return [
        [Action(chunk * ranks + rank, ActionKind.FORWARD, m) for m in range(micro_batches) for chunk in range(chunks)]
        for rank in range(ranks)
    ]


class _Run(NamedTuple):
    """All (stage, micro-batch) of a rank, as forwards and as backwards come."""

    forwards: Sequence[tuple[int, int]]
    backwards: Sequence[tuple[int, int]]


def _gpipe(rank: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(rank, kind, number) for kind in kinds for number in range(micro_batches)]


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-H1 (arXiv 2401.10241, section 2.1): later ranks, which wait at the end of a step, put off more.

    Rank r runs the gradients of weights r micro-batches behind their backward. It never has more micro-batches under
    way than `1f1b` has on its first rank.
    """
    forwards = iter([Action(rank, ActionKind.FORWARD, number) for number in range(micro_batches)])
    weights = iter([Action(rank, ActionKind.WEIGHT, number) for number in range(micro_batches)])
    actions = list(itertools.islice(forwards, ranks - rank))
    for number in range(micro_batches):
        actions.append(Action(rank, ActionKind.BACKWARD, number))
        actions += itertools.islice(weights, int(number >= rank))
        actions += itertools.islice(forwards, 1)
    return [*actions, *weights]


def _plain(rank: int, micro_batches: int) -> _Run:
    pairs = [(rank, number) for number in range(micro_batches)]
    return _Run(pairs, pairs)


def _interleaved(rank: int, ranks: int, chunks: int, micro_batches: int, size: int) -> _Run:
    """Rounds of `size` micro-batches: each chunk runs one, then the next chunk does; backwards from the last chunk."""

    def in_rounds(order: Sequence[int]) -> list[tuple[int, int]]:
        firsts = range(0, micro_batches, size)
        return [(c * ranks + rank, m) for first in firsts for c in order for m in range(first, first + size)]

    return _Run(in_rounds(range(chunks)), in_rounds(range(chunks)[::-1]))


def _one_by_one(run: _Run, ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, and the backwards that are left."""
    ahead = min(ahead, len(run.forwards))
    forwards = [Action(stage, ActionKind.FORWARD, number) for stage, number in run.forwards]
    backwards = [Action(stage, ActionKind.BACKWARD, number) for stage, number in run.backwards]
    turns = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Where each stage begins so that the highest cost of one is as low as can be; the earlier the better.

    Args:
        costs: of the modules, in their order.

    Raises:
        BadInput: fewer modules than stages.
    """
    if len(costs) < stages:
        raise BadInput(
            f"The pipeline's line has {len(costs)} modules, too few for {stages} stages (pp × chunks): take fewer, or "
            "a model with more layers; in a loop of your own tz.Pipeline(line=[...]) may name smaller modules."
        )
    before = [0, *itertools.accumulate(costs)]
    highest: list[float] = [math.inf, *before[1:]]
    cuts = [[0] * len(before)]
    for _ in range(stages - 1):
        highest, begins_of_last = _one_stage_more(before, highest)
        cuts.append(begins_of_last)
    begins = [len(costs)]
    for begins_of_last in reversed(cuts):
        begins.append(begins_of_last[begins[-1]])
    return begins[:0:-1]


def _one_stage_more(before: Sequence[int], highest: Sequence[float]) -> tuple[list[float], list[int]]:
    """For each number of modules the highest cost with one stage more than `highest` has, and where that one begins.

    The later a stage begins, the less it costs and the more those before it may: the best is where the two meet, which
    only moves on with the number of modules.
    """
    values: list[float] = [math.inf]
    cuts, cut = [0], 0
    for end in range(1, len(before)):
        while cut < end - 1 and not _earlier_cost_more(before, highest, cut, end):
            cut += 1
        first = max(0, cut - 1)
        value, begin = min((max(highest[at], before[end] - before[at]), at) for at in range(first, cut + 1))
        while begin and max(highest[begin - 1], before[end] - before[begin - 1]) == value:
            begin -= 1
        values.append(value)
        cuts.append(begin)
    return values, cuts


def _earlier_cost_more(before: Sequence[int], highest: Sequence[float], cut: int, end: int) -> bool:
    """Whether the stages before `cut` cost as much as the one from there to `end`, and can be cut at all."""
    return highest[cut] >= before[end] - before[cut] and highest[cut] != math.inf
