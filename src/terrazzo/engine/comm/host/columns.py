"""Exchanges between ranks of many machines: over the network once for each machine, the rest by reading memory.

Put the ranks of each machine in a row: what then stands one below the other is a column, one rank of each machine. Over
the network a rank talks to its column alone, in rounds: in the k-th it sends to the machine k further on and receives
from the one k back, and few rounds are under way at a time. A gather goes through the columns first; then each rank
reads from its neighbours what their columns have brought. A reduction begins with the neighbours: a rank sends to each
machine what all ranks of its own contribute there. Values are passed on, never sums, so the order of sums is free.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.host.announced_data import Announcement, Stamp, announced_as
from terrazzo.engine.comm.host.neighbours import Memory, Neighbour
from terrazzo.engine.labels.label import Label
from terrazzo.engine.runtime.device import HOST

__all__ = ["MANY_FAR", "ROUNDS", "Columns", "columns_of"]

MANY_FAR = 32
"""Ranks on other machines. Where a rank has more of them, exchanges go by columns."""
ROUNDS = 4
"""Under way at a time."""


class Columns:
    """A group's ranks as a table.

    Args:
        rank: of this process in the group.
        rows: the ranks of each machine; equally many.
        ranks: which ones those of the group are among all.
    """

    def __init__(self, rank: int, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        self.rank, self.rows, self._ranks = rank, rows, ranks
        self.own_row = next(row for row in rows if rank in row)
        self.width = len(self.own_row)
        self._slots = min(ROUNDS, len(rows) - 1)
        self._index, self._column = rows.index(self.own_row), self.own_row.index(rank)

    @property
    def staging_chunks(self) -> int:
        """Chunks that are put together to be sent, in a reduction."""
        return self._slots * self.width if self.width > 1 else 0

    def gather(
        self, group: dist.ProcessGroup, stamp: Stamp, near: Mapping[int, Neighbour], full: Tensor, kind: str = "gather"
    ) -> None:
        """Fill `full` from every rank's own chunk of it, among the exchanges of that kind."""
        chunks = full.view(-1, full.numel() // (len(self.rows) * self.width))
        own = chunks[self.rank]
        self._rounds(group, stamp, lambda turn, rank: own, lambda row: chunks[row[self._column]])
        with memories_of(near, kind, full, stamp.label) as memories:
            for other, memory in memories.items():
                for row in self.rows:
                    source = row[self.own_row.index(other)]
                    memory.read(source * own.nbytes, chunks[source])

    def reduce(
        self,
        group: dist.ProcessGroup,
        stamp: Stamp,
        near: Mapping[int, Neighbour],
        full: Tensor,
        use: Callable[[Sequence[Tensor | Memory]], None],
    ) -> None:
        """Call `use` with every rank's contribution to this rank's chunk, in rank order."""
        chunks = full.view(len(self.rows) * self.width, -1)
        chunk_bytes = chunks[0].nbytes
        staging = full.new_empty(self.staging_chunks, chunks.shape[1])
        arrived = {row[0]: full.new_empty(self.width, chunks.shape[1]) for row in self.rows if row is not self.own_row}
        with memories_of(near, "reduce", full, stamp.label) as memories:

            def contributions(turn: int, rank: int) -> Tensor:
                if self.width == 1:
                    return chunks[rank]
                first = turn % self._slots * self.width
                parts = staging[first : first + self.width]
                for part, member in zip(parts, self.own_row, strict=True):
                    if member == self.rank:
                        part.copy_(chunks[rank])
                    else:
                        memories[member].read(rank * chunk_bytes, part)
                return parts

            self._rounds(group, stamp, contributions, lambda row: arrived[row[0]])
            sources: dict[int, Tensor | Memory] = {self.rank: chunks[self.rank]}
            for row in self.rows:
                if row is not self.own_row:
                    sources.update(zip(row, arrived[row[0]], strict=True))
            for other, memory in memories.items():
                sources[other] = Memory(memory.pid, memory.address + self.rank * chunk_bytes, memory.owner)
            use([sources[rank] for rank in sorted(sources)])

    def _rounds(
        self,
        group: dist.ProcessGroup,
        stamp: Stamp,
        outgoing: Callable[[int, int], Tensor],
        incoming: Callable[[Sequence[int]], Tensor],
    ) -> None:
        """Send to and receive from every other rank of this column.

        Args:
            outgoing: of the number of the round and the rank that it is for; its memory may serve a later round.
            incoming: of the row that it comes from.
        """
        count = len(self.rows)
        under_way: deque[_Round] = deque()
        for turn in range(1, count):
            if len(under_way) == self._slots:
                under_way.popleft().finish()
            ahead, back = self.rows[(self._index + turn) % count], self.rows[(self._index - turn) % count]
            source, target, into = back[self._column], ahead[self._column], incoming(back)
            heard = Announcement(stamp.label, into.nbytes, self._ranks[source])
            announcement = group.recv([heard.message], source, stamp.first)
            coming = group.recv([into], source, stamp.then(into.nbytes))
            part = outgoing(turn, target)
            announced = group.send([announced_as(stamp.label, part)], target, stamp.first)
            going = group.send([part], target, stamp.then(part.nbytes))
            under_way.append(_Round(heard, announcement, [coming, announced, going]))
        while under_way:
            under_way.popleft().finish()


class _Round(NamedTuple):
    """Messages to and from another rank of the column; the first to come says what is moved."""

    heard: Announcement
    announcement: Any
    rest: Sequence[Any]

    def finish(self) -> None:
        self.announcement.wait()
        self.heard.check()
        for work in self.rest:
            work.wait()


@contextmanager
def memories_of(near: Mapping[int, Neighbour], kind: str, tensor: Tensor, label: Label) -> Iterator[dict[int, Memory]]:
    """Give the tensor that each neighbour offers; until the block ends none changes its own, this rank neither."""
    for neighbour in near.values():
        neighbour.offer(kind, tensor, label)
    yield {other: neighbour.offered(kind, tensor.nbytes, label) for other, neighbour in near.items()}
    for neighbour in near.values():
        neighbour.say_taken(kind)
    for neighbour in near.values():
        neighbour.await_taken(kind, label)


def columns_of(
    rank: int, ranks: Sequence[int], near: Collection[int], all_gather: Callable[[Tensor], Tensor]
) -> Columns | None:
    """The table of a group's ranks if it spans many machines, else None; collective.

    Where machines have different numbers of ranks, or not all of one can read each other, each rank is a row of its
    own, and neighbours' memory is not read.

    Args:
        ranks: which ones those of the group are among all.
        near: this rank's neighbours.
        all_gather: every rank's 1-D int64 tensor, as rows; blocks.
    """
    together = sorted([rank, *near])
    checksum = int.from_bytes(hashlib.sha256(repr(together).encode()).digest()[:7])
    rows_of_ranks = all_gather(torch.tensor([checksum, len(together)], device=HOST)).tolist()
    size = len(ranks)
    if size - min(count for _, count in rows_of_ranks) <= MANY_FAR:
        return None
    rows: dict[int, list[int]] = {}
    for other, (of_other, _) in enumerate(rows_of_ranks):
        rows.setdefault(of_other, []).append(other)
    regular = all(len(rows[of_other]) == count == len(together) for of_other, count in rows_of_ranks)
    return Columns(rank, list(rows.values()) if regular else [[other] for other in range(size)], ranks)
