"""What ranks have of matrices on their way to owners and back, and the exchanges between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.optim.matrices.matrix_owners import CUT, AxisExchange, Matrix, MatrixPart, Owners
from terrazzo.engine.plan.layout import Range

__all__ = ["ExchangeAlong", "MatrixBuffers", "exchange_parts", "gather_cut", "room", "scatter_cut"]


class ExchangingAxis(Protocol):
    """Collectives along one axis, or what only counts them."""

    def all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int]
    ) -> Moves[Tensor]: ...


@dataclass
class MatrixBuffers:
    """Buffers of what this rank has of some matrices on their way, counted in a ledger."""

    dtype: torch.dtype
    device: torch.device
    ledger: Ledger
    parts: dict[Matrix, tuple[Range, Tensor]] = field(default_factory=dict)

    def put(self, part: MatrixPart, values: Tensor) -> None:
        """Have `values` of it, in the place of what there is."""
        self.drop(part.matrix)
        self.ledger.acquire(values.nbytes)
        self.parts[part.matrix] = part.range, values

    def drop(self, matrix: Matrix) -> None:
        if (dropped := self.parts.pop(matrix, None)) is not None:
            self.ledger.release(dropped[1].nbytes)

    def of(self, part: MatrixPart) -> Tensor:
        held, values = self.parts[part.matrix]
        return values[part.range.within(held)]

    def makeroom(self, parts: Iterable[MatrixPart]) -> None:
        """Have memory for these, each all that is here of its matrix, where there is none yet."""
        for part in parts:
            if part.matrix not in self.parts:
                self.put(part, room(self, part.range.numel))

    def widen(self, parts: Sequence[MatrixPart]) -> None:
        """Have room for further parts of the matrices that some are here of."""
        wanted: dict[Matrix, Range] = {}
        for matrix, held in parts:
            known = wanted.get(matrix) or (self.parts[matrix][0] if matrix in self.parts else held)
            wanted[matrix] = Range(min(known.start, held.start), max(known.stop, held.stop))
        for matrix, whole in wanted.items():
            widened = room(self, whole.numel)
            if matrix in self.parts:
                held, values = self.parts[matrix]
                widened[held.within(whole)] = values
            self.put(MatrixPart(matrix, whole), widened)


ExchangeAlong = Callable[[ExchangingAxis], Moves[None]]


def exchange_parts(buffers: MatrixBuffers, exchange: AxisExchange, keep: bool, along: ExchangingAxis) -> Moves[None]:
    """Carry out one exchange.

    Args:
        keep: what is sent stays here too.
    """
    sides = exchange.sent, exchange.received
    sent, received = ([part for parts in side for part in parts] for side in sides)
    outgoing = torch.cat([buffers.of(part) for part in sent]) if sent else room(buffers, 0)
    incoming = room(buffers, sum(part.range.numel for part in received))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix in {part.matrix for part in sent} if not keep else ():
            buffers.drop(matrix)
        numels = [[sum(part.range.numel for part in parts) for parts in side] for side in sides]
        yield from along.all_to_all(outgoing, numels[0], incoming, numels[1])
        buffers.widen(received)
        for part, values in zip(received, incoming.split([part.range.numel for part in received]), strict=True):
            buffers.of(part).copy_(values)


def room(buffers: MatrixBuffers, numel: int) -> Tensor:
    """Uninitialised memory for `numel` elements, 1-D, of the dtype and on the device of `buffers`."""
    return torch.empty(numel, dtype=buffers.dtype, device=buffers.device)


class _Crossing:
    """Parts of some matrices that cross `tp` between the ranks that have them and the owners, either way.

    Attributes:
        away: parts of this rank's, each with the rank that owns the matrix, in the order of these ranks.
        home: parts of matrices that this rank owns, each with the rank that has it, likewise.
        away_numels, home_numels: elements that cross to or from each rank.
    """

    def __init__(self, owners: Owners, among: Sequence[Matrix]) -> None:
        rank, size = owners.along(CUT)
        held = [matrix for matrix in among if owners.has_part(matrix)]
        others = [other for other in range(size) if other != rank]
        self.rank, self.own = rank, [matrix for matrix in held if owners.is_here(matrix)]
        self.away = [(matrix, other) for other in others for matrix in held if owners.coordinates[matrix][CUT] == other]
        self.home = [(matrix, other) for other in others for matrix in self.own]
        self.away_numels, self.home_numels = [0] * size, [0] * size
        for matrix, other in self.away:
            self.away_numels[other] += matrix.boxes[rank].local_numel
        for matrix, other in self.home:
            self.home_numels[other] += matrix.boxes[other].local_numel


def gather_cut(buffers: MatrixBuffers, owners: Owners, among: Sequence[Matrix], along: ExchangingAxis) -> Moves[None]:
    """Bring the parts that ranks along `tp` have of matrices to the owners, which then have all of each."""
    crossing = _Crossing(owners, among)
    outgoing = _concatenated(buffers, [buffers.parts[matrix][1] for matrix, _ in crossing.away])
    incoming = room(buffers, sum(crossing.home_numels))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix, _ in crossing.away:
            buffers.drop(matrix)
        yield from along.all_to_all(outgoing, crossing.away_numels, incoming, crossing.home_numels)
        values = incoming.split([matrix.boxes[other].local_numel for matrix, other in crossing.home])
        parts = dict(zip(crossing.home, values, strict=True))
        for matrix in crossing.own:
            parts[matrix, crossing.rank] = buffers.parts[matrix][1]
            full = room(buffers, math.prod(matrix.shape))
            for other, box in enumerate(matrix.boxes):
                box.put(parts[matrix, other].view(box.local_shape), full.view(matrix.shape))
            buffers.put(MatrixPart(matrix, matrix.whole), full)


def scatter_cut(buffers: MatrixBuffers, owners: Owners, among: Sequence[Matrix], along: ExchangingAxis) -> Moves[None]:
    """Bring what owners have of matrices to the ranks along `tp`, its part to each."""
    crossing = _Crossing(owners, among)
    parts = {
        (matrix, other): box.of(buffers.parts[matrix][1].view(matrix.shape)).reshape(-1)
        for matrix in crossing.own
        for other, box in enumerate(matrix.boxes)
    }
    outgoing = _concatenated(buffers, [parts[matrix, other] for matrix, other in crossing.home])
    incoming = room(buffers, sum(crossing.away_numels))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix in crossing.own:
            buffers.put(MatrixPart(matrix, matrix.range), parts[matrix, crossing.rank])
        yield from along.all_to_all(outgoing, crossing.home_numels, incoming, crossing.away_numels)
        values = incoming.split([matrix.range.numel for matrix, _ in crossing.away])
        for (matrix, _), own in zip(crossing.away, values, strict=True):
            buffers.put(MatrixPart(matrix, matrix.range), own.clone())


def _concatenated(buffers: MatrixBuffers, values: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in values]) if values else room(buffers, 0)
