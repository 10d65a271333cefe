"""What matrices and their gradients look like on the wire where they are sent in blocks: 256 codes and a scale in fp32.

A code is a whole number from -127 to 127 under `int8` and from -7 to 7 under `int4`, two of which make a byte, and a
floating-point number of 8 bits (e4m3) under `fp8`. The scale is that of the largest magnitude of the block, rounded to
16 bits: then a code times its scale is exact in fp32. So values that have been sent once are the same when they are
sent again, on their way over several axes, in backward, and wherever the weights at rest are those that came.

A value that is not finite makes its block not finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from terrazzo.engine.buckets.buffer import Space
from terrazzo.engine.comm.traffic import Ledger
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.plan.layout import BlockFormat, Range, round_up, tiles, wire_scratch_bytes
from terrazzo.engine.plan.precision import WireFormat

__all__ = ["BlockMessage", "as_sent", "block_tiles", "decode", "encode"]

_LARGEST = {WireFormat.INT8: 127.0, WireFormat.INT4: 7.0, WireFormat.FP8: torch.finfo(torch.float8_e4m3fn).max}


class BlockMessage:
    """Elements of a bucket on their way, in blocks.

    Args:
        space: of the elements.
        axes: over which they are split when they have arrived.
        through: the dtype that they are rounded to before.
    """

    def __init__(
        self, space: Space, axes: tuple[str, ...], form: WireFormat, through: torch.dtype, ledger: Ledger
    ) -> None:
        self._space, self._form, self._through, self._ledger = space, form, through, ledger
        self._blocks = space.packed(form.blocks).empty(axes, torch.uint8)

    @property
    def nbytes(self) -> int:
        """Of memory, to be counted while it is there."""
        return self._blocks.nbytes

    def bring(self, own: Tensor, axes: tuple[str, ...]) -> Moves[None]:
        """Send this rank's elements, and receive those of the others.

        Args:
            own: those that splitting over the longer list `axes` leaves, in any dtype.
        """
        into = self._blocks.narrow(axes).data
        with self._ledger.holding(self._scratch_bytes(own)):
            for part, packed in block_tiles(own, self._form.blocks):
                encode(own[part].to(self._through), self._form, into[packed])
        yield from self._blocks.complete(axes)

    def unpack(self, into: Tensor) -> None:
        """Put what has arrived into a tensor of any dtype; this rank's own elements are as the others see them."""
        with self._ledger.holding(self._scratch_bytes(into)):
            for part, packed in block_tiles(into, self._form.blocks):
                values = decode(self._blocks.data[packed], self._form)
                into[part].copy_(values if into.dtype == self._through else values.to(self._through))

    def _scratch_bytes(self, values: Tensor) -> int:
        return wire_scratch_bytes(self._space.layout.numel, values.device.type)


def as_sent(values: Tensor, form: WireFormat, through: torch.dtype) -> Tensor:
    """What ranks see of `values` that are sent: 1-D, from the beginning of a block, in the dtype `through`."""
    seen = torch.empty_like(values, dtype=through)
    for part, _ in block_tiles(values, form.blocks):
        own = values[part].to(through)
        blocks = own.new_zeros(round_up(own.numel(), form.blocks.numel))
        blocks[: own.numel()] = own
        packed = torch.empty(form.blocks.size_bytes(blocks.numel()), dtype=torch.uint8, device=own.device)
        encode(blocks, form, packed)
        seen[part] = decode(packed, form)[: own.numel()]
    return seen


def encode(values: Tensor, form: WireFormat, into: Tensor) -> None:
    """Replace the blocks `into` by those of `values`.

    Args:
        values: 1-D, of whole blocks.
        into: uint8, as many bytes for each block as the format has.
    """
    rows, blocks = values.float().view(-1, form.blocks.numel), into.view(-1, form.blocks.nbytes)
    coded = _codes_bytes(form)
    scale = _scale(torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()) / _LARGEST[form])
    codes = rows.div(torch.where(scale == 0, 1.0, scale)).clamp_(-_LARGEST[form], _LARGEST[form])
    if form is WireFormat.INT8:
        blocks[:, :coded].view(torch.int8).copy_(codes.round_())
    elif form is WireFormat.INT4:
        low, high = codes.round_().add_(_ZERO).split(coded, 1)
        blocks[:, :coded] = torch.add(low, high, alpha=16)
    else:
        blocks[:, :coded] = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    blocks.view(torch.float32)[:, coded // 4 :] = scale


def decode(blocks: Tensor, form: WireFormat) -> Tensor:
    """The values of whole blocks, 1-D fp32. `blocks`: uint8, as `encode` fills them."""
    rows, coded = blocks.view(-1, form.blocks.nbytes), _codes_bytes(form)
    packed = rows[:, :coded]
    if form is WireFormat.INT4:
        codes = torch.cat([packed.bitwise_and(15), packed.bitwise_right_shift(4)], 1).float().sub_(_ZERO)
    else:
        codes = packed.view(torch.int8 if form is WireFormat.INT8 else torch.float8_e4m3fn).float()
    return codes.mul_(rows.view(torch.float32)[:, coded // 4 :]).view(-1)


_ZERO = 8
"""The code of zero in 4 bits, which are without a sign: the first half of a block is in the low ones of its bytes."""


def _codes_bytes(form: WireFormat) -> int:
    return form.blocks.nbytes - torch.float32.itemsize


def _scale(exact: Tensor) -> Tensor:
    """To 16 bits: what is not finite stays so, whatever its bits are."""
    rounded = (exact.view(torch.int32) + 0x80).bitwise_and_(-0x100).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, torch.nan)


def block_tiles(values: Tensor, blocks: BlockFormat) -> Iterator[tuple[slice, slice]]:
    """Whole blocks that are encoded or decoded at once: where they are among the elements, and among the bytes."""
    for tile in tiles(Range(0, values.numel()), values.device.type):
        packed = blocks.bytes_of(tile)
        yield slice(tile.start, tile.stop), slice(packed.start, packed.stop)
