"""Outer gradients of replicas that train by themselves: their mean over replicas, and what that holds and sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.block_sums import sum_everywhere
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Moves, Transfer
from terrazzo.engine.formats.block_format import tile_numel
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.labels.label import Label
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.diloco import OUTER_BLOCKS, DiLoCo
from terrazzo.engine.plan.layout import Range

__all__ = ["OuterPart", "begin_exchange", "dry_run_exchange", "exchange_bytes", "messages_of", "tiles_of"]


class OuterPart(NamedTuple):
    """Elements of one bucket that this rank has, and where they are in the message that carries them."""

    bucket: Bucket
    elements: Range
    in_message: Range


def messages_of(settings: DiLoCo, buckets: Sequence[Bucket], *, whole: bool = False) -> Iterator[list[OuterPart]]:
    """Messages of an outer step: this rank's parts of the buckets, one after the other; a `whole` one has all."""
    owned = [(bucket, bucket.space.range(bucket.spec.outer_axes)) for bucket in buckets]
    left = deque((bucket, own) for bucket, own in owned if own.numel)
    for numel in settings.messages(sum(own.numel for _, own in left), whole=whole):
        parts, end = list[OuterPart](), 0
        while end < numel:
            bucket, own = left.popleft()
            stop = min(own.stop, own.start + numel - end)
            parts.append(OuterPart(bucket, Range(own.start, stop), Range(end, end + stop - own.start)))
            end += stop - own.start
            if stop < own.stop:
                left.appendleft((bucket, Range(stop, own.stop)))
        yield parts


def tiles_of(parts: Sequence[OuterPart], device: torch.device) -> Iterator[tuple[Bucket, Range, slice]]:
    """The elements of `parts` a little at a time, as states on `nvme` are read, and where each is in the message."""
    for bucket, elements, in_message in parts:
        for cut in bucket.exact.cuts(elements):
            for tile in cut.pieces(tile_numel(device.type)):
                start = in_message.start + tile.start - elements.start
                yield bucket, tile, slice(start, start + tile.numel)


def _numel(parts: Sequence[OuterPart]) -> int:
    return parts[-1].in_message.stop if parts else 0


def begin_exchange(
    settings: DiLoCo, parts: Sequence[OuterPart], axes: Axes, label: Label, ledger: Ledger, counted: ExitStack
) -> Transfer[Tensor]:
    """Have the mean of outer gradients of some parts, in memory that `ledger` counts until `counted` is closed."""
    numel, along, device = _numel(parts), axes.along(axes.replica_axis[0]), axes.device
    if numel:
        counted.enter_context(ledger.holding(settings.held_bytes(numel, along.size, device.type)))
    return Transfer(_exchange(settings, parts, along, device), label)


def _exchange(settings: DiLoCo, parts: Sequence[OuterPart], along: Collectives, device: torch.device) -> Moves[Tensor]:
    """The mean of outer gradients of all replicas. It holds no `Rounds`, which holds the transfer of it."""
    numel = _numel(parts)
    message = torch.zeros(settings.message_numel(numel, along.size), device=device)
    for bucket, tile, within in tiles_of(parts, device):
        with bucket.outer[0].opened(tile) as first, bucket.exact.opened(tile) as weights:
            message[within].copy_(first - weights)
    if numel:
        mean = _mean_of_blocks if settings.traffic == "int8" else _mean
        yield from mean(message, numel, along)
    return message


def _mean(message: Tensor, numel: int, along: Collectives) -> Moves[None]:
    """Replace the outer gradients of this replica by the mean of all."""
    if along.size > 1:
        message.copy_((yield from along.all_reduce(message, message.dtype, along.size)))


def _mean_of_blocks(message: Tensor, numel: int, along: Collectives) -> Moves[None]:
    """Replace them by the mean of what blocks of 8 bits stand for, those of this replica too."""
    own = message[:numel]
    yield from sum_everywhere(along, own, OUTER_BLOCKS)
    own.div_(along.size)


def exchange_bytes(settings: DiLoCo, numel: int, axes: Axes) -> int:
    """Memory of the exchange of `numel` elements, with what arrives of it."""
    along = axes.along(axes.replica_axis[0])
    sums = along.size > 1 and settings.traffic == "fp32"
    received = along.receive_bytes(settings.message_numel(numel, along.size) * torch.float32.itemsize) if sums else 0
    return settings.held_bytes(numel, along.size, axes.device.type) + received


def dry_run_exchange(settings: DiLoCo, numel: int, axes: Axes, tally: Tally) -> None:
    """Count in `tally` what that exchange holds and sends."""
    replicas = axes.size(axes.replica_axis)
    with tally.ledger.holding(exchange_bytes(settings, numel, axes)):
        if replicas > 1:
            kind = "all_gather" if settings.traffic == "int8" else "all_reduce"
            tally.traffic.record(kind, settings.sent_bytes(numel, replicas))
