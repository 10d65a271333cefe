"""Updates of whole matrices, each on its owner, for an optimizer that needs them whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.summed import SummedGradient
from terrazzo.engine.comm.label import Label, Purpose
from terrazzo.engine.comm.tally import Tally
from terrazzo.engine.comm.traffic import Ledger, Traffic
from terrazzo.engine.comm.transfer import Moves, Transfer
from terrazzo.engine.optim.matrix_owners import CUT, AxisExchange, Matrix, MatrixPart, Owners, owners_of
from terrazzo.engine.optim.segment import Segment, held_range, runs
from terrazzo.engine.optim.segment_states import SegmentStates
from terrazzo.engine.optim.template import MatrixNeeds, Templates
from terrazzo.engine.plan.layout import Range
from terrazzo.optim import MatrixOptimizer

__all__ = ["MatrixSteps", "dry_run_matrices"]


class MatrixAxis(Protocol):
    """Collectives along one axis, or what only counts them."""

    def all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int]
    ) -> Moves[Tensor]: ...


@dataclass
class _MatrixBuffers:
    """What this rank has of some matrices on their way, and the memory that it takes."""

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

    def widen(self, parts: Sequence[MatrixPart]) -> None:
        """Have room for further parts of the matrices that some are here of."""
        wanted: dict[Matrix, Range] = {}
        for matrix, held in parts:
            known = wanted.get(matrix) or (self.parts[matrix][0] if matrix in self.parts else held)
            wanted[matrix] = Range(min(known.start, held.start), max(known.stop, held.stop))
        for matrix, whole in wanted.items():
            room = torch.empty(whole.numel, dtype=self.dtype, device=self.device)
            if matrix in self.parts:
                held, values = self.parts[matrix]
                room[held.within(whole)] = values
            self.put(MatrixPart(matrix, whole), room)


_ExchangeAlong = Callable[[MatrixAxis], Moves[None]]


def _exchange_parts(buffers: _MatrixBuffers, exchange: AxisExchange, keep: bool, along: MatrixAxis) -> Moves[None]:
    """Carry out one exchange.

    Args:
        keep: what is sent stays here too.
    """
    sides = exchange.sent, exchange.received
    sent, received = ([part for parts in side for part in parts] for side in sides)
    outgoing = torch.cat([buffers.of(part) for part in sent]) if sent else _room(buffers, 0)
    incoming = _room(buffers, sum(part.range.numel for part in received))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix in {part.matrix for part in sent} if not keep else ():
            buffers.drop(matrix)
        numels = [[sum(part.range.numel for part in parts) for parts in side] for side in sides]
        yield from along.all_to_all(outgoing, numels[0], incoming, numels[1])
        buffers.widen(received)
        for part, values in zip(received, incoming.split([part.range.numel for part in received]), strict=True):
            buffers.of(part).copy_(values)


def _room(buffers: _MatrixBuffers, numel: int) -> Tensor:
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
        self.away = [(matrix, other) for other in others for matrix in held if owners.places[matrix][CUT] == other]
        self.home = [(matrix, other) for other in others for matrix in self.own]
        self.away_numels, self.home_numels = [0] * size, [0] * size
        for matrix, other in self.away:
            self.away_numels[other] += matrix.boxes[rank].local_numel
        for matrix, other in self.home:
            self.home_numels[other] += matrix.boxes[other].local_numel


def _gather_cut(buffers: _MatrixBuffers, owners: Owners, among: Sequence[Matrix], along: MatrixAxis) -> Moves[None]:
    """Bring the parts that ranks along `tp` have of matrices to the owners, which then have all of each."""
    crossing = _Crossing(owners, among)
    outgoing = _concatenated(buffers, [buffers.parts[matrix][1] for matrix, _ in crossing.away])
    incoming = _room(buffers, sum(crossing.home_numels))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix, _ in crossing.away:
            buffers.drop(matrix)
        yield from along.all_to_all(outgoing, crossing.away_numels, incoming, crossing.home_numels)
        values = incoming.split([matrix.boxes[other].local_numel for matrix, other in crossing.home])
        parts = dict(zip(crossing.home, values, strict=True))
        for matrix in crossing.own:
            parts[matrix, crossing.rank] = buffers.parts[matrix][1]
            full = _room(buffers, math.prod(matrix.shape))
            for other, box in enumerate(matrix.boxes):
                box.put(parts[matrix, other].view(box.local_shape), full.view(matrix.shape))
            buffers.put(MatrixPart(matrix, matrix.whole), full)


def _scatter_cut(buffers: _MatrixBuffers, owners: Owners, among: Sequence[Matrix], along: MatrixAxis) -> Moves[None]:
    """Bring what owners have of matrices to the ranks along `tp`, its part to each."""
    crossing = _Crossing(owners, among)
    parts = {
        (matrix, other): box.of(buffers.parts[matrix][1].view(matrix.shape)).reshape(-1)
        for matrix in crossing.own
        for other, box in enumerate(matrix.boxes)
    }
    outgoing = _concatenated(buffers, [parts[matrix, other] for matrix, other in crossing.home])
    incoming = _room(buffers, sum(crossing.away_numels))
    with buffers.ledger.holding(outgoing.nbytes + incoming.nbytes):
        for matrix in crossing.own:
            buffers.put(MatrixPart(matrix, matrix.range), parts[matrix, crossing.rank])
        yield from along.all_to_all(outgoing, crossing.home_numels, incoming, crossing.away_numels)
        values = incoming.split([matrix.range.numel for matrix, _ in crossing.away])
        for (matrix, _), own in zip(crossing.away, values, strict=True):
            buffers.put(MatrixPart(matrix, matrix.range), own.clone())


def _concatenated(buffers: _MatrixBuffers, values: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in values]) if values else _room(buffers, 0)


class MatrixSteps:
    """Steps the matrices of one optimizer.

    Args:
        buckets: those with parameters of its own, unit by unit.
        groups: numbers of its param groups of matrices, and these.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Mapping[int, dict[str, object]]) -> None:
        self._groups = groups
        self._owners = owners_of(buckets, groups.keys())

    def has(self, segment: Segment) -> bool:
        """Whether it is of matrices."""
        return segment.group in self._groups

    def step(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, SummedGradient]
    ) -> None:
        """Update all that have gradients. Collective.

        Args:
            finished: the gradients of buckets.
        """
        own: dict[Bucket, list[Segment]] = {}
        for segment in segments:
            if self.has(segment):
                own.setdefault(segment.bucket, []).append(segment)
        for owners in self._owners:
            due = [matrix for matrix in owners.matrices if _is_due(matrix)]
            if due and isinstance(optimizer, MatrixOptimizer):
                self._step(optimizer, owners, due, own, finished)

    def _step(
        self,
        optimizer: MatrixOptimizer,
        owners: Owners,
        due: Sequence[Matrix],
        own: Mapping[Bucket, Sequence[Segment]],
        finished: Mapping[Bucket, SummedGradient],
    ) -> None:
        axes, label = owners.axes, Label(Purpose.MATRICES)
        buffers = _MatrixBuffers(optimizer.wire, axes.device, axes.tally.ledger)
        parts = [(matrix, segment) for matrix in due if (segment := _segment_of(matrix, owners, own)) is not None]
        by_segment: dict[Segment, list[Matrix]] = {}
        for matrix, segment in parts:
            by_segment.setdefault(segment, []).append(matrix)
        for segment, matrices in by_segment.items():
            segment.take_gradient(finished)
            self._prepare(optimizer, segment, [*filter(owners.sends, matrices)], buffers)

        def carry(axis: str, moves: _ExchangeAlong) -> None:
            Transfer(moves(axes.along(axis)), label).finish()

        _update(owners, due, buffers, carry, lambda matrix: self._whole(optimizer, matrix, buffers))
        for matrix, segment in parts:
            part = MatrixPart(matrix, owners.held(matrix))
            values = segment.parameter.detach()[part.range.within(segment.range)]
            optimizer.apply(self._groups[segment.group], values, buffers.of(part), matrix.shape)
        for matrix in due:
            buffers.drop(matrix)

    def _prepare(
        self, optimizer: MatrixOptimizer, segment: Segment, matrices: Sequence[Matrix], buffers: _MatrixBuffers
    ) -> None:
        """Change the states of a segment with a gradient, and buffer what owners of `matrices` are to have of it."""
        parameter = segment.parameter
        assert parameter.grad is not None
        needs, states = MatrixNeeds(optimizer.wire, optimizer.workspace_bytes), SegmentStates(segment)
        with buffers.ledger.holding(needs.prepare_bytes(parameter.numel(), segment.bucket.precision)):
            state = optimizer.state.get(parameter) or {}
            loaded = {key: states.load(key, value, parameter) for key, value in state.items()}
            update = optimizer.prepare(self._groups[segment.group], loaded, parameter.grad)
            optimizer.state[parameter] = {key: states.store(key, value) for key, value in loaded.items()}
            parameter.grad = None
            for matrix in matrices:
                part = matrix.range.intersect(segment.range)
                buffers.put(MatrixPart(matrix, part), update[part.within(segment.range)].clone())

    def _whole(self, optimizer: MatrixOptimizer, matrix: Matrix, buffers: _MatrixBuffers) -> Tensor:
        group = self._groups[matrix.bucket.members[matrix.number].group]
        with buffers.ledger.holding(optimizer.workspace_bytes(matrix.shape)):
            values = buffers.of(MatrixPart(matrix, matrix.whole)).view(matrix.shape)
            return optimizer.whole(group, values).reshape(-1)


def _update(
    owners: Owners,
    due: Sequence[Matrix],
    buffers: _MatrixBuffers,
    carry: Callable[[str, _ExchangeAlong], None],
    whole: Callable[[Matrix], Tensor],
) -> None:
    """From what this rank holds of matrices to what it gets of their updates.

    Args:
        carry: exchanges along an axis.
    """
    for exchange in owners.gathers(due):
        carry(exchange.axis, partial(_exchange_parts, buffers, exchange, False))
    for axis in owners.cut:
        carry(axis, partial(_gather_cut, buffers, owners, due))
    for matrix in filter(owners.is_here, due):
        buffers.put(MatrixPart(matrix, matrix.whole), whole(matrix))
    for axis in owners.cut:
        carry(axis, partial(_scatter_cut, buffers, owners, due))
    for exchange in owners.returns(due):
        carry(exchange.axis, partial(_exchange_parts, buffers, exchange, True))


class _CountingAxis:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int]
    ) -> Moves[Tensor]:
        self._traffic.record("all_to_all", sent.nbytes)
        yield from ()
        return received


def dry_run_matrices(
    buckets: Sequence[Bucket],
    templates: Templates,
    tally: Tally,
    traffic_along: Callable[[str], Traffic] | None = None,
) -> None:
    """Count in `tally` what an update of all matrices in the model's trainable `buckets` holds and sends.

    Args:
        traffic_along: where what is sent along an axis is counted instead.
    """
    groups = {number: each.matrices for number, each in enumerate(templates) if each.matrices is not None}
    for owners in owners_of(buckets, groups.keys()):
        needs = groups[owners.group]
        buffers = _MatrixBuffers(needs.wire, torch.device("meta"), tally.ledger)
        due = list(owners.matrices)
        for bucket in {matrix.bucket: None for matrix in due}:
            for first, last in runs(bucket):
                own = held_range(bucket, first, last)
                if bucket.members[first].group in groups and own.numel:
                    with tally.ledger.holding(needs.prepare_bytes(own.numel, bucket.precision)):
                        for matrix in (each for each in due if each.bucket is bucket and first <= each.number < last):
                            if owners.sends(matrix) and (part := owners.held(matrix)).numel:
                                buffers.put(MatrixPart(matrix, part), _room(buffers, part.numel))

        def carry(axis: str, moves: _ExchangeAlong) -> None:
            for _ in moves(_CountingAxis(tally.traffic if traffic_along is None else traffic_along(axis))):
                pass

        def whole(matrix: Matrix, buffers: _MatrixBuffers = buffers, needs: MatrixNeeds = needs) -> Tensor:
            with tally.ledger.holding(needs.workspace_bytes(matrix.shape)):
                return _room(buffers, matrix.whole.numel)

        _update(owners, due, buffers, carry, whole)
        for matrix in due:
            buffers.drop(matrix)


def _is_due(matrix: Matrix) -> bool:
    """Whether there is a finished gradient for it on any rank."""
    gradient = matrix.bucket.gradient
    return gradient.finished.exists and gradient.seen[matrix.number]


def _segment_of(matrix: Matrix, owners: Owners, own: Mapping[Bucket, Collection[Segment]]) -> Segment | None:
    """The segment with this rank's part of it; None where it holds nothing."""
    part = owners.held(matrix)
    overlapping = (each for each in own.get(matrix.bucket, ()) if each.range.intersect(part).numel)
    return next(overlapping, None) if part.numel else None
