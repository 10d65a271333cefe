"""Updates of whole matrices, each on its owner, for an optimizer that needs them whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.comm.transfer import Moves, Transfer
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.optim.matrices.matrix_exchange import (
    ExchangeAlong,
    MatrixBuffers,
    exchange_parts,
    gather_cut,
    room,
    scatter_cut,
)
from terrazzo.engine.optim.matrices.matrix_host_steps import ApplyOffDevice, PrepareOffDevice
from terrazzo.engine.optim.matrices.matrix_owners import Matrix, MatrixPart, Owners, owners_of
from terrazzo.engine.optim.segments.group_runs import GroupedBucket, held_range, runs
from terrazzo.engine.optim.segments.off_device_updates import OffDeviceUpdates
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.segments.segment_step import SegmentStates
from terrazzo.engine.optim.segments.state_memory import StateMemory
from terrazzo.engine.optim.stock.template import MatrixNeeds
from terrazzo.optim import MatrixOptimizer

__all__ = ["MatrixSteps", "dry_run_matrices"]


class MatrixSteps:
    """Steps the matrices of one optimizer.

    Args:
        buckets: those with parameters of its own, unit by unit.
        groups: numbers of its param groups of matrices, and these.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: Mapping[int, dict[str, object]]) -> None:
        self._groups = groups
        self._owners = owners_of(buckets, groups.keys())
        self._buckets: Mapping[GroupedBucket, Bucket] = {bucket: bucket for bucket in buckets}

    def has(self, segment: Segment) -> bool:
        """Whether it is of matrices."""
        return segment.group in self._groups

    def step(
        self,
        optimizer: Optimizer,
        segments: Sequence[Segment],
        finished: Mapping[Bucket, SummedGradient],
        off_device: OffDeviceUpdates,
    ) -> None:
        """Update all that have gradients. Collective.

        Args:
            finished: the gradients of buckets.
            off_device: carries out what is done where states rest away from the device.
        """
        own: dict[GroupedBucket, list[Segment]] = {}
        for segment in segments:
            if self.has(segment):
                own.setdefault(segment.bucket, []).append(segment)
        for owners in self._owners:
            due = [matrix for matrix in owners.matrices if self._is_due(matrix)]
            if due and isinstance(optimizer, MatrixOptimizer):
                self._step(optimizer, owners, due, own, finished, off_device)

    def _step(  # structure: what `step` has, of matrices that are exchanged at once
        self,
        optimizer: MatrixOptimizer,
        owners: Owners,
        due: Sequence[Matrix],
        own: Mapping[GroupedBucket, Sequence[Segment]],
        finished: Mapping[Bucket, SummedGradient],
        off_device: OffDeviceUpdates,
    ) -> None:
        axes, label = self._buckets[due[0].bucket].axes, Label(Purpose.MATRICES)
        buffers = MatrixBuffers(optimizer.wire, axes.device, axes.tally.ledger)
        parts: dict[Segment, list[MatrixPart]] = {}
        for matrix in due:
            for segment in _segments_of(matrix, owners, own):
                parts.setdefault(segment, []).append(MatrixPart(matrix, owners.held(matrix).intersect(segment.range)))
        away = [segment for segment in parts if segment.bucket.spec.updated_off_device]
        for segment, held in parts.items():
            sent = [part for part in held if owners.sends(part.matrix)]
            if segment in away:
                buffers.makeroom([MatrixPart(matrix, owners.held(matrix)) for matrix, _ in sent])
            else:
                segment.take_gradient(finished)
                self._prepare(optimizer, segment, sent, buffers)
        if away:
            sent_parts = {each: [part for part in parts[each] if owners.sends(part.matrix)] for each in away}
            prepare = PrepareOffDevice(optimizer, self._groups, sent_parts, buffers)
            off_device.carry_out(prepare, away, optimizer, finished)

        def carry(axis: str, moves: ExchangeAlong) -> None:
            Transfer(moves(axes.along(axis)), label).finish()

        _update(owners, due, buffers, carry, lambda matrix: self._whole(optimizer, matrix, buffers))
        for segment, part in ((each, part) for each, held in parts.items() for part in held if each not in away):
            values = segment.parameter.detach()[part.range.within(segment.range)]
            optimizer.apply(self._groups[segment.group], values, buffers.of(part), part.matrix.shape)
        if away:
            apply = ApplyOffDevice(optimizer, self._groups, parts, buffers)
            off_device.carry_out(apply, away, optimizer, finished)
        for matrix in due:
            buffers.drop(matrix)

    def _is_due(self, matrix: Matrix) -> bool:
        """Whether there is a finished gradient for it on any rank."""
        gradient = self._buckets[matrix.bucket].gradient
        return gradient.finished.exists and gradient.seen[matrix.number]

    def _prepare(
        self, optimizer: MatrixOptimizer, segment: Segment, sent: Sequence[MatrixPart], buffers: MatrixBuffers
    ) -> None:
        """Change the states of a segment with a gradient, and buffer what owners are `sent` of it."""
        parameter = segment.parameter
        assert parameter.grad is not None
        needs = MatrixNeeds(optimizer.wire, optimizer.workspace_bytes)
        states = SegmentStates(segment, StateMemory(segment))
        with buffers.ledger.holding(needs.prepare_bytes(parameter.numel(), segment.bucket.spec.precision)):
            state = optimizer.state.get(parameter) or {}
            loaded = {key: states.load(key, value, parameter) for key, value in state.items()}
            update = optimizer.prepare(self._groups[segment.group], loaded, parameter.grad)
            optimizer.state[parameter] = {key: states.store(key, value) for key, value in loaded.items()}
            parameter.grad = None
            for part in sent:
                buffers.put(part, update[part.range.within(segment.range)].clone())

    def _whole(self, optimizer: MatrixOptimizer, matrix: Matrix, buffers: MatrixBuffers) -> Tensor:
        group = self._groups[matrix.bucket.members[matrix.number].group]
        with buffers.ledger.holding(optimizer.workspace_bytes(matrix.shape)):
            values = buffers.of(MatrixPart(matrix, matrix.whole)).view(matrix.shape)
            return optimizer.whole(group, values).reshape(-1)


def _update(
    owners: Owners,
    due: Sequence[Matrix],
    buffers: MatrixBuffers,
    carry: Callable[[str, ExchangeAlong], None],
    whole: Callable[[Matrix], Tensor],
) -> None:
    """Bring matrices to their owners, update them there, and bring back what becomes of them.

    Args:
        carry: exchanges along an axis.
    """
    for exchange in owners.gathers(due):
        carry(exchange.axis, partial(exchange_parts, buffers, exchange, False))
    for axis in owners.cut:
        carry(axis, partial(gather_cut, buffers, owners, due))
    for matrix in filter(owners.is_here, due):
        buffers.put(MatrixPart(matrix, matrix.whole), whole(matrix))
    for axis in owners.cut:
        carry(axis, partial(scatter_cut, buffers, owners, due))
    for exchange in owners.returns(due):
        carry(exchange.axis, partial(exchange_parts, buffers, exchange, True))


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
    buckets: Sequence[GroupedBucket],
    groups: Mapping[int, MatrixNeeds],
    tally: Tally,
    traffic_along: Callable[[str], Traffic] | None = None,
) -> None:
    """Count in `tally` what an update of all matrices in the model's trainable `buckets` holds and sends.

    Args:
        groups: numbers of param groups of matrices, and what these take; see `matrix_needs`.
        traffic_along: where what is sent along an axis is counted instead.
    """
    for owners in owners_of(buckets, groups.keys()):
        needs = groups[owners.group]
        buffers = MatrixBuffers(needs.wire, torch.device("meta"), tally.ledger)
        due = list(owners.matrices)
        for bucket in {matrix.bucket: None for matrix in due}:
            for start, stop in runs(bucket):
                own = held_range(bucket, start, stop)
                if bucket.members[start].group in groups and own.numel:
                    here = not bucket.spec.updated_off_device
                    with tally.ledger.holding(needs.prepare_bytes(own.numel, bucket.spec.precision) if here else 0):
                        for matrix in (each for each in due if each.bucket is bucket and start <= each.number < stop):
                            if owners.sends(matrix) and (part := owners.held(matrix)).numel:
                                buffers.put(MatrixPart(matrix, part), room(buffers, part.numel))

        def carry(axis: str, moves: ExchangeAlong) -> None:
            for _ in moves(_CountingAxis(tally.traffic if traffic_along is None else traffic_along(axis))):
                pass

        def whole(matrix: Matrix, buffers: MatrixBuffers = buffers, needs: MatrixNeeds = needs) -> Tensor:
            with tally.ledger.holding(needs.workspace_bytes(matrix.shape)):
                return room(buffers, matrix.whole.numel)

        _update(owners, due, buffers, carry, whole)
        for matrix in due:
            buffers.drop(matrix)


def _segments_of(matrix: Matrix, owners: Owners, own: Mapping[GroupedBucket, Collection[Segment]]) -> list[Segment]:
    """Segments with this rank's part of a matrix: one, or on `nvme` one for each cell; none where it holds nothing."""
    part = owners.held(matrix)
    return [each for each in own.get(matrix.bucket, ()) if each.range.intersect(part).numel]
