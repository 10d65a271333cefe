"""Sums of gradients over ranks that send them in blocks of codes.

Each rank encodes what it has once. Codes are never added: who sums blocks decodes all, its own too, and adds in fp32
in rank order. A block that is not finite on one rank is not finite in the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.engine.buckets.wire import block_tiles, decode, encode
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Moves, outlives_chain
from terrazzo.engine.plan.precision import WireFormat

__all__ = ["gather_sums", "sum_everywhere", "sum_scattered"]


def sum_scattered(along: Collectives, values: Tensor, form: WireFormat, dtype: torch.dtype) -> Moves[Tensor]:
    """This rank's chunk of the sum of every rank's `values`, as a new tensor.

    Args:
        values: 1-D, of any dtype; each chunk of it is whole blocks.
        dtype: of the sum, which is rounded to it once.
    """
    sent = _empty_blocks(values, values.numel(), form)
    _encode(values, form, sent)
    received = torch.empty_like(sent)
    each = [sent.numel() // along.size] * along.size
    yield from along.all_to_all(sent, each, received, each, "reduce_scatter")
    total = outlives_chain(lambda: values.new_empty(values.numel() // along.size, dtype=dtype))
    chunks = received.view(along.size, -1)
    _add_decoded(chunks, form, total)
    return total


def sum_everywhere(along: Collectives, values: Tensor, form: WireFormat) -> Moves[None]:
    """Replace `values`, 1-D, fp32, of whole blocks, by the sum of every rank's; all take the same blocks."""
    blocks = values.new_empty(along.size, form.blocks.size_bytes(values.numel()), dtype=torch.uint8)
    _encode(values, form, blocks[along.rank])
    if along.size > 1:
        yield from along.all_gather(blocks.view(-1))
    _add_decoded(blocks, form, values)


def gather_sums(along: Collectives, own: Tensor, form: WireFormat) -> Moves[Tensor]:
    """Every rank's `own` in one new tensor of the same dtype. All ranks have what the blocks stand for."""
    numel = own.numel() * along.size
    message = _empty_blocks(own, numel, form)
    _encode(own, form, message.view(along.size, -1)[along.rank])
    yield from along.all_gather(message, "all_reduce")
    whole = outlives_chain(lambda: own.new_empty(numel))
    for part, packed in block_tiles(whole, form.blocks):
        whole[part] = decode(message[packed], form)
    return whole


def _encode(values: Tensor, form: WireFormat, into: Tensor) -> None:
    for part, packed in block_tiles(values, form.blocks):
        encode(values[part], form, into[packed])


def _add_decoded(rows: Tensor, form: WireFormat, into: Tensor) -> None:
    """The sum of what the blocks of each row stand for, in fp32 and in the order of rows."""
    for part, packed in block_tiles(into, form.blocks):
        summed = decode(rows[0, packed], form)
        for row in rows[1:]:
            summed += decode(row[packed], form)
        into[part] = summed


def _empty_blocks(like: Tensor, numel: int, form: WireFormat) -> Tensor:
    return like.new_empty(form.blocks.size_bytes(numel), dtype=torch.uint8)
