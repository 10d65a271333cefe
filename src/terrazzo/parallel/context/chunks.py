"""Which places of a sequence each rank of a context-parallel group holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from terrazzo.errors import BadInput

__all__ = ["BALANCES", "Balance", "Chunks", "TokenRun"]

Balance = Literal["head_tail", "none"]
BALANCES: tuple[Balance, ...] = ("head_tail", "none")


@dataclass(frozen=True)
class TokenRun:
    """Neighbouring tokens of a sequence.

    Attributes:
        offset: where the first of them is in the tensor that has them.
        place: where the first of them is in the sequence.
        length: how many there are.
    """

    offset: int
    place: int
    length: int

    @property
    def end(self) -> int:
        """The place behind the last."""
        return self.place + self.length


@dataclass(frozen=True)
class Chunks:
    """Sequences cut over `ranks`.

    With `head_tail` there are two chunks for each rank, and rank r holds the r-th from the start and the r-th from the
    end: a causal mask then gives all ranks the same work. With `none` there is one chunk for each rank.
    """

    ranks: int
    balance: Balance = "head_tail"

    @property
    def count(self) -> int:
        """How many chunks a sequence is cut into."""
        return self.ranks * (2 if self.balance == "head_tail" and self.ranks > 1 else 1)

    def of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them."""
        return (rank,) if self.count == self.ranks else (rank, self.count - 1 - rank)

    def check(self, length: int) -> None:
        """Refuse sequences that cannot be cut into equal chunks.

        Raises:
            BadInput: there.
        """
        if length % self.count:
            each = "two for each rank" if self.count > self.ranks else "one for each rank"
            least = length // self.count * self.count
            fits = " or ".join(str(size) for size in (least, least + self.count) if size)
            raise BadInput(
                f"Sequences of {length} tokens do not divide into {self.count} equal chunks, {each} of {self.ranks}"
                f" that share a sequence (cp). Use sequences of {fits} tokens."
            )

    def runs(self, rank: int, length: int) -> list[TokenRun]:
        """What a rank holds of a sequence of `length` tokens, in its order."""
        size = length // self.count
        return [TokenRun(index * size, chunk * size, size) for index, chunk in enumerate(self.of(rank))]

    def places(self, rank: int, length: int, device: torch.device | None = None) -> Tensor:
        """The place of each token that a rank holds, int64 `[length / ranks]`."""
        runs = self.runs(rank, length)
        return torch.cat([torch.arange(run.place, run.end, device=device) for run in runs])

    def split(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's part of `whole`, which has all places along `dim`."""
        self.check(whole.shape[dim])
        if self.ranks == 1:
            return whole
        return torch.cat([whole.narrow(dim, run.place, run.length) for run in self.runs(rank, whole.shape[dim])], dim)

    def in_order(self, parts: Tensor, dim: int) -> Tensor:
        """Whole sequences from the parts of all ranks, `[ranks, ...]`; `dim` is that of the sequence in a part."""
        if self.ranks == 1:
            return parts[0]
        each = self.count // self.ranks
        chunks = [chunk for part in parts.unbind() for chunk in part.chunk(each, dim)]
        numbers = [number for rank in range(self.ranks) for number in self.of(rank)]
        return torch.cat([chunks[numbers.index(number)] for number in range(self.count)], dim)

    def by_rank(self, whole: Tensor, dim: int) -> Tensor:
        """The inverse of `in_order`."""
        if self.ranks == 1:
            return whole.unsqueeze(0)
        chunks = whole.chunk(self.count, dim)
        return torch.stack([torch.cat([chunks[chunk] for chunk in self.of(rank)], dim) for rank in range(self.ranks)])
