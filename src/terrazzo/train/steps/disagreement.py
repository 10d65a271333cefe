"""Finds which rank computes wrongly, from the answers of ranks to the same micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from terrazzo.messages import of_ranks

__all__ = ["Disagreement", "RankAnswer", "finding_of"]


class RankAnswer(NamedTuple):
    """A rank's answer to a micro-batch.

    Attributes:
        rank: that computed it.
        of: a key of the micro-batch, equal where the same is computed.
        units: the units in the order in which their gradients were complete.
        digests: of each unit's gradients.
    """

    rank: int
    of: tuple[int, ...]
    units: tuple[str, ...]
    digests: tuple[tuple[int, ...], ...]


class Disagreement(NamedTuple):
    """Answers that differ where they should not.

    Attributes:
        text: what is wrong, in sentences.
        of_kernels: whether no machine is at fault: most ranks do not get the same result twice.
    """

    text: str
    of_kernels: bool = False


def finding_of(answers: Sequence[RankAnswer]) -> Disagreement | None:
    """What is wrong with the answers of all ranks; None if all that should be equal are.

    An answer is right if more than half of the ranks that were asked have given it. If two ranks disagree neither is,
    unless one disagrees with itself.
    """
    answers_to: defaultdict[tuple[int, ...], list[RankAnswer]] = defaultdict(list)
    for answer in answers:
        answers_to[answer.of].append(answer)
    apart = {of: group for of, group in answers_to.items() if len({each.digests for each in group}) > 1}
    if not apart:
        return None
    ranks = {answer.rank for answer in answers}
    wavering = {rank for rank in ranks for group in apart.values() if _disagrees_with_itself(rank, group)}
    if len(ranks) > 1 and 2 * len(wavering) > len(ranks):
        return Disagreement(
            f"{of_ranks(wavering)} each computed one micro-batch twice, with two results.", of_kernels=True
        )
    wrong, undecided = Counter[int](), set[int]()
    for group in apart.values():
        if (right := _right(group)) is None:
            undecided |= {each.rank for each in group}
        else:
            wrong.update(each.rank for each in group if each.digests != right)
    if wrong:
        return Disagreement(" ".join(_of_rank(rank, count, answers, apart) for rank, count in sorted(wrong.items())))
    if wavering:
        return Disagreement(" ".join(_transient(rank, apart) for rank in sorted(wavering)))
    return Disagreement(
        f"Inconclusive: {of_ranks(undecided)} compute the gradients of {_unit(*apart.values())} differently from the"
        " same micro-batch, and each does so again. One of them is wrong, and two cannot tell which: a third would."
    )


def _right(answers: Sequence[RankAnswer]) -> tuple[tuple[int, ...], ...] | None:
    """The answer of more than half of several ranks; None if there is none."""
    by = defaultdict(set)
    for each in answers:
        by[each.digests].add(each.rank)
    digests, ranks = max(by.items(), key=lambda pair: len(pair[1]))
    ranks_asked = {each.rank for each in answers}
    return digests if 2 * len(ranks) > len(ranks_asked) > 1 else None


def _disagrees_with_itself(rank: int, answers: Sequence[RankAnswer]) -> bool:
    return len({each.digests for each in answers if each.rank == rank}) > 1


def _of_rank(
    rank: int, count: int, answers: Sequence[RankAnswer], apart: dict[tuple[int, ...], list[RankAnswer]]
) -> str:
    """A sentence on a rank whose answers differ from those of most."""
    own = [each for each in answers if each.rank == rank]
    about = [group for of, group in apart.items() if any(each.rank == rank for each in apart[of])]
    others = {each.rank for group in about for each in group} - {rank}
    how = "each time" if count == len(own) else f"{count} of {len(own)} times"
    return (
        f"Rank {rank} computes the gradients of {_unit(*about)} differently from {of_ranks(others)}, which have the"
        f" same weights, the same micro-batch and the same random numbers: {how}."
    )


def _transient(rank: int, apart: dict[tuple[int, ...], list[RankAnswer]]) -> str:
    about = [group for group in apart.values() if _disagrees_with_itself(rank, group)]
    return f"Rank {rank} computed the gradients of {_unit(*about)} twice from one micro-batch, with two results."


def _unit(*groups: Sequence[RankAnswer]) -> str:
    """The first unit, in the order of backward, in which answers differ: later differences follow from it."""
    first = groups[0][0]
    for number, unit in enumerate(first.units):
        if any(len({each.digests[number : number + 1] for each in group}) > 1 for group in groups):
            return unit
    return "units"
