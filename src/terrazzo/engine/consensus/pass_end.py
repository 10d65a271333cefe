"""Meetings of ranks at the end of a pass: to hear who needs what, and to notice if they have not run the same."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.labels.label import Label, labelled
from terrazzo.engine.labels.rank_places import NOT_THE_SAME
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart

__all__ = ["MEETING_NUMEL", "meet", "words_numel"]

MEETING_NUMEL = 3
"""int64 elements that each meeting exchanges over every axis, besides its flags."""
_FLAGS = 63
"""Flags in one int64, a word, whose sign stays."""


def words_numel(flags: int) -> int:
    """Words that so many flags take."""
    return -(-flags // _FLAGS)


def meet(
    axes: Axes, progress: Progress, label: Label, number: int = 0, flags: Sequence[bool] = ()
) -> tuple[int, list[bool]]:
    """Return the greatest `number` of all ranks, and whether each of the `flags` is set on any; blocks.

    Raises:
        RanksApart: if another rank has come with another label, or has issued other exchanges than this one on a
            transport whose messages carry no labels.
    """
    checksum = _checksum(axes, progress)
    values = torch.tensor([checksum, ~checksum, number, *_words(flags)], device=HOST)
    with labelled(label):
        largest, smallest, greatest, *words = axes.total(values, axes.within_stage, _combined).tolist()
        if largest != ~smallest:
            _name_difference(axes, progress, label)
    return greatest, [bool(words[place // _FLAGS] >> place % _FLAGS & 1) for place in range(len(flags))]


def _words(flags: Sequence[bool]) -> Iterator[int]:
    for start in range(0, len(flags), _FLAGS):
        yield sum(flag << place for place, flag in enumerate(flags[start : start + _FLAGS]))


def _combined(rows: Tensor, dim: int) -> Tensor:
    """What ranks bring to a meeting together, of the `rows` of each."""
    numbers, words = rows[:, :MEETING_NUMEL], rows[:, MEETING_NUMEL:]
    return torch.cat([numbers.amax(dim), functools.reduce(torch.bitwise_or, words.unbind(dim))])


_Numbers = Iterable[tuple[str, float]]
"""Numbers by name; an int is compared to its last bit."""


class _Alike(NamedTuple):
    """Numbers that must be the same on all ranks at every meeting.

    Attributes:
        numbers: this rank's; as many on every rank, under the same names, in the same order.
        said: where one differs, of its `name`, this rank's `own`, the `low`est and the `high`est, and the `last` edit.
    """

    numbers: Callable[[Progress], _Numbers]
    said: str


def _hyper_parameters(progress: Progress) -> _Numbers:
    return [each for noted in progress.hyper_parameters.values() for each in noted.values().items()]


def _denominators(progress: Progress) -> _Numbers:
    return [(name, float(number)) for name, number in progress.denominator.numbers().items()]


_ALIKE = (
    _Alike(
        lambda progress: [("steps", progress.steps)],
        "optimizer.step() has been called {own:.0f} times here, and from {low:.0f} to {high:.0f} times on all ranks. "
        "Every rank must step, or none: agree on it, for example with an all_reduce of whether the loss is finite.",
    ),
    _Alike(
        lambda progress: [("edits", progress.edits())],
        "gradients have been forgotten or changed on some ranks and not on others, or by other numbers; what was done "
        "last here: {last}. Each rank steps its own part of the weights: call zero_grad(), set .grad to None, scale "
        "and clip on every rank or on none.",
    ),
    _Alike(
        _hyper_parameters,
        "optimizer.step() has used {name} = {own} here, and {low} to {high} on all ranks. Set the same on every rank: "
        "give a scheduler that follows a metric, such as ReduceLROnPlateau, the metric's mean over the ranks.",
    ),
    _Alike(
        _denominators,
        "the gradients' {name} is {own:g} here, and {low:g} to {high:g} on all ranks. Give set_gradient_denominator, "
        "or load_scaler_state, the same on every rank, such as the tokens of the whole global batch.",
    ),
)
"""What ranks compare at every meeting, beside what has been exchanged; of several that differ the first is named."""


def _all_alike(progress: Progress) -> Iterator[tuple[str, str, float]]:
    """What is said of it, name and value of each number in `_ALIKE`."""
    for each in _ALIKE:
        yield from ((each.said, name, number) for name, number in each.numbers(progress))


def _checksum(axes: Axes, progress: Progress) -> int:
    """A checksum of `_ALIKE`, and of what has been exchanged on transports whose messages carry no labels."""
    checksum = zlib.crc32(repr([number for _, _, number in _all_alike(progress)]).encode())
    for along in axes.of_states:
        checksum = zlib.crc32(along.checksum.to_bytes(4, "little"), checksum)
    return checksum


def _name_difference(axes: Axes, progress: Progress, label: Label) -> NoReturn:
    """Raise an error that names what differs between ranks, whose checksums do. Collective.

    Raises:
        RanksApart: naming the first of `_ALIKE` that does, or the first exchange.
    """
    alike = {str(place): each for place, each in enumerate(_all_alike(progress))}
    if differing := axes.differing({place: number for place, (_, _, number) in alike.items()}, axes.within_stage):
        said, name, own = alike[differing[0]]
        ranks = axes.rows(torch.tensor([own], dtype=torch.float64, device=HOST), axes.within_stage)
        low, high = ranks.amin().item(), ranks.amax().item()
        found = said.format(name=name, own=own, low=low, high=high, last=progress.last_edit)
        raise RanksApart(f"{NOT_THE_SAME}: before {label}, {found}")
    for along in axes.of_states:
        trail = [*along.trail]
        numbers = torch.tensor([dist.get_rank(), *trail], device=HOST)
        for rank, *theirs in axes.rows(numbers, axes.within_stage).tolist():
            label.check_trail(trail, theirs, rank)
    raise RanksApart(f"{NOT_THE_SAME} some time before {label}. {label.edit}")
