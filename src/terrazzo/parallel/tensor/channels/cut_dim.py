"""The dim of a tensor that ranks have in parts, and one call of one of torch's functions with such tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

__all__ = [
    "TAKES",
    "ChannelCut",
    "ChannelCuts",
    "ChannelRule",
    "FunctionCall",
    "HeadCounts",
    "Mixed",
    "leaves",
    "merged",
]

TAKES = "takes channels by their places, and each rank has other ones there"


@dataclass(frozen=True, eq=False)
class HeadCounts:
    """Numbers of heads, in one forward, by which those of this rank are told from those of the whole.

    Attributes:
        ranks: how many there are.
        here: how many heads this rank has, of some matrix.
    """

    ranks: int
    here: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ChannelCut:
    """The dim of a tensor along which each rank has a part.

    Attributes:
        name: of the module that computed it first.
        dim: from the left.
        sizes: what this rank has of each of the runs that the whole dim is made of: of several matrices that are fused
            into one, or of each sequence where these were put before the heads.
        heads: of each run that is channels, of how many heads they are on this rank; None: that is not known.
        counts: of this forward.
    """

    name: str
    dim: int
    sizes: tuple[int, ...]
    heads: tuple[int | None, ...]
    counts: HeadCounts

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def between(self, start: int, stop: int, *, by_number: bool) -> ChannelCut:
        """That of the elements from `start` to `stop` of the dim, as a forward names them.

        They must be some of the runs, and not all: a number of channels of the whole, which is more than there are
        here, would take all of this rank's, or none. Nor may they be several between numbers that are ends of runs
        of the whole as well: there they would be fewer.
        """
        ends = [0, *itertools.accumulate(self.sizes)]
        if not 0 <= start < stop <= self.numel or (start, stop) == (0, self.numel) or not {start, stop} <= {*ends}:
            raise Mixed(self, TAKES)
        first, last = ends.index(start), ends.index(stop)
        if by_number and last - first > 1 and {start, stop} <= {each * self.counts.ranks for each in ends}:
            raise Mixed(self, TAKES)
        return replace(self, sizes=self.sizes[first:last], heads=self.heads[first:last])


class Mixed(Exception):
    """A function computes with channels of this rank where it would with those of others.

    Attributes:
        cut: of the tensor that has them.
        does: what the function does with them.
    """

    def __init__(self, cut: ChannelCut, does: str) -> None:
        super().__init__(does)
        self.cut, self.does = cut, does


ChannelCuts = list[tuple[Tensor, ChannelCut]]
"""The results of a call that ranks have in parts."""


@dataclass(frozen=True)
class FunctionCall:
    """One call of one of torch's functions.

    Attributes:
        name: of the function, of a method that changes its tensor without the `_` behind it.
        named: arguments by name, in the order of the function's parameters.
        cut_of: the dim that ranks have in parts, of a tensor of which that is known.
        result: None before it is called.
    """

    name: str
    args: Sequence[Any]
    named: Mapping[str, Any]
    cut_of: Callable[[Tensor], ChannelCut | None]
    result: Any = None

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """The argument at a place, or under a name."""
        for name in names:
            if name in self.named:
                return self.named[name]
        return self.args[place] if len(self.args) > place else default

    def numbers(self, place: int, *names: str) -> Any:
        """The numbers from a place on, or under a name: several arguments, or one sequence of them."""
        rest = self.args[place:]
        return tuple(rest) if len(rest) > 1 else self.argument(place, *names, default=())

    @property
    def first(self) -> Tensor:
        found: Tensor = self.args[0] if self.args else next(iter(self.named.values()))
        return found

    def dims(self, given: Any, tensor: Tensor | None = None) -> list[int]:
        """Dims from the left; all of them where none are given."""
        count = (self.first if tensor is None else tensor).dim()
        if given is None or given == ():
            return list(range(count))
        return [each % max(count, 1) for each in (given if isinstance(given, list | tuple) else [given])]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that it was given to compute with."""
        named = [value for name, value in self.named.items() if name != "out"]
        return [each for each in leaves([*self.args, *named]) if isinstance(each, Tensor)]

    @property
    def results(self) -> list[Tensor]:
        """What it has returned, or has written to."""
        return [
            each for each in leaves(self.first if self.name == "setitem" else self.result) if isinstance(each, Tensor)
        ]

    @property
    def cut(self) -> ChannelCut | None:
        """That of the first argument."""
        return self.cut_of(self.first) if isinstance(self.first, Tensor) else None


ChannelRule = Callable[[FunctionCall], ChannelCuts]
"""The results of a call that ranks have in parts, and along which dim.

Raises:
    Mixed: the call computes with channels of this rank where it would with those of others.
"""


def leaves(values: Any) -> list[Any]:
    """What is in nested lists and tuples."""
    if isinstance(values, list | tuple):
        return [leaf for each in values for leaf in leaves(each)]
    return [values]


def merged(cuts: Sequence[ChannelCut], result: Tensor) -> ChannelCut:
    """That of a result of tensors that are broadcast."""
    widest = max(cuts, key=lambda cut: cut.numel)
    for other in cuts:
        if other.dim != widest.dim or (other.numel == widest.numel and other.sizes != widest.sizes):
            raise Mixed(widest, f"puts channels together with other channels, those of {other.name!r}")
    if result.shape[widest.dim] != widest.numel:
        raise Mixed(widest, "puts this rank's one channel together with all of another tensor")
    return widest
