"""Formats that the gradients of a bucket are sent in, and the moves that sum them along each axis.

Along one axis, the outermost data axis, a precision may have gradients sent in blocks of codes; along all others they
are sent in its `reduce` dtype. `buckets/gradients/gradient` makes these moves with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from terrazzo.engine.formats.format_names import WireFormat
from terrazzo.engine.plan.error_feedback import adding_bytes
from terrazzo.engine.plan.moves import MoveBytes

__all__ = ["Axis", "GradientWire"]


class Axis(Protocol):
    """An axis of ranks, real or planned, with the sizes that its collectives have."""

    @property
    def size(self) -> int: ...
    @property
    def all_reduce_steps(self) -> int: ...
    def receive_bytes(self, full_bytes: int) -> int: ...


@dataclass(frozen=True)
class GradientWire:
    """Format of gradients along each axis over which ranks sum them.

    Attributes:
        ranks: the axes.
        dtype: of gradients as they are sent, where they are not sent in blocks.
        sum_dtype: of their sums.
        form: of the blocks along `block_axis`; both None where all axes send a dtype.
        has_residuals: whether error feedback adds residuals before gradients are encoded.
        device: kind of the device on which they are encoded.
    """

    ranks: Mapping[str, Axis]
    dtype: torch.dtype
    sum_dtype: torch.dtype
    form: WireFormat | None
    block_axis: str | None
    has_residuals: bool
    device: str

    def scatter(self, axis: str, full: int, own: int) -> MoveBytes:
        """Reduce-scatter of `full` elements, of whose sum each rank keeps `own`.

        Blocks are summed as they are decoded.
        """
        sum_bytes, form = own * self.sum_dtype.itemsize, self.form
        if form is not None and axis == self.block_axis:
            sent, received = form.blocks.size_bytes(full - own), 2 * form.blocks.size_bytes(full)
            received += form.blocks.scratch_bytes(full, self.device)
            received += adding_bytes(full, self.device) if self.has_residuals else 0
        else:
            itemsize = self.dtype.itemsize
            sent, received, form = (full - own) * itemsize, self.ranks[axis].receive_bytes(full * itemsize), None
        return MoveBytes("reduce_scatter", "gradients", axis, sent, received, 1, sum_bytes, form=form)

    def all_reduces(self, axes: Sequence[str], numel: int) -> list[MoveBytes]:
        """All-reduces of `numel` elements along each of these axes in turn; the last of them divides."""
        moves, full_bytes = list[MoveBytes](), self.dtype.itemsize * numel
        for axis in axes:
            along, divides = self.ranks[axis], axis == axes[-1]
            if axis == self.block_axis:
                moves += self._all_reduce_in_blocks(axis, numel, divides)
                continue
            sent, received = 2 * (full_bytes / along.size) * (along.size - 1), along.receive_bytes(full_bytes)
            steps = along.all_reduce_steps
            moves.append(MoveBytes("all_reduce", "gradients", axis, sent, received, steps, divides=divides))
        return moves

    def _all_reduce_in_blocks(self, axis: str, numel: int, divides: bool) -> list[MoveBytes]:
        """All-reduce in which each rank sums a part in fp32, and sends the sum in blocks too."""
        first = self.scatter(axis, numel, numel // self.ranks[axis].size)
        assert first.form is not None, "sums are sent in a dtype"
        message = first.form.blocks.size_bytes(numel)
        held = first.received_bytes + first.sum_bytes
        then = MoveBytes("all_gather", "gradients", axis, first.sent_bytes, held - message, form=first.form)
        divides = divides and not self.has_residuals  # these are of sums before their division
        return [first._replace(received_bytes=held, divides=divides), then]
