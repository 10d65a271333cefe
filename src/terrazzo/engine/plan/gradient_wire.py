"""Formats that the gradients of a bucket are sent in, and the moves that sum them along each axis.

Along one axis, the outermost data axis, a precision may have gradients sent in blocks of codes; along all others they
are sent in its `reduce` dtype. `buckets/gradients/gradient` makes these moves with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from terrazzo.engine.formats.format_names import WireFormat
from terrazzo.engine.mesh.family import seeing_other_data
from terrazzo.engine.plan.error_feedback import ResidualSpec, adding_bytes, residuals_along
from terrazzo.engine.plan.moves import MoveBytes
from terrazzo.engine.plan.precision import Precision

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
        ranks: the axes, innermost first; data axes come first.
        split: those over which sums are split in the end, in order.
        precision: the dtypes of gradients as they are sent and of their sums, and the format of blocks.
        in_blocks: whether the gradients may be sent in blocks.
        device: kind of the device on which they are encoded.
    """

    ranks: Mapping[str, Axis]
    split: tuple[str, ...]
    precision: Precision
    in_blocks: bool
    device: str

    @cached_property
    def form(self) -> WireFormat | None:
        """Format of the blocks along `block_axis`; None where they are sent in a dtype."""
        return self.precision.quantized_reduce if self.in_blocks else None

    @cached_property
    def block_axis(self) -> str | None:
        """Axis along which gradients are sent in blocks, the outermost data axis; None for none."""
        data = seeing_other_data(self.ranks)
        return data[-1] if data and self.form is not None else None

    @cached_property
    def residuals(self) -> Sequence[ResidualSpec]:
        """Residuals of gradients' codes that a rank keeps; none without error feedback."""
        if self.block_axis is None or not self.precision.error_feedback:
            return ()
        return residuals_along(self.block_axis, self.split, self.ranks)

    def scatter(self, axis: str, full: int, own: int) -> MoveBytes:
        """Reduce-scatter of `full` elements, of whose sum each rank keeps `own`.

        Blocks are summed as they are decoded.
        """
        sum_bytes, form = own * self.precision.accumulate.itemsize, self.form
        if form is not None and axis == self.block_axis:
            sent, received = form.blocks.size_bytes(full - own), 2 * form.blocks.size_bytes(full)
            received += form.blocks.scratch_bytes(full, self.device)
            received += adding_bytes(full, self.device) if self.residuals else 0
        else:
            itemsize = self.precision.reduce.itemsize
            sent, received, form = (full - own) * itemsize, self.ranks[axis].receive_bytes(full * itemsize), None
        return MoveBytes("reduce_scatter", "gradients", axis, sent, received, 1, sum_bytes, form=form)

    def all_reduces(self, axes: Sequence[str], numel: int) -> list[MoveBytes]:
        """All-reduces of `numel` elements along each of these axes in turn; the last of them divides."""
        moves, full_bytes = list[MoveBytes](), self.precision.reduce.itemsize * numel
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
        divides = divides and not self.residuals  # these are of sums before their division
        return [first._replace(received_bytes=held, divides=divides), then]
