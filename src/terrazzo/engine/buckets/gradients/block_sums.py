"""Sums of gradients over ranks that send them in blocks of codes.

Each rank encodes what it has once. Codes are never added: who sums blocks decodes all, its own too, and adds in fp32
in rank order. A block that is not finite on one rank is not finite in the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Moves, outlives_chain
from terrazzo.engine.formats.block_format import BlockCodes

__all__ = ["Encode", "encode_all", "gather_sums", "sum_everywhere", "sum_scattered"]

Encode = Callable[[Tensor, BlockCodes, Tensor], None]
"""Replaces blocks, the last argument, by those of values, the first: `encode_all`, or with error feedback."""


def sum_scattered(
    along: Collectives, values: Tensor, blocks: BlockCodes, dtype: torch.dtype, encode: Encode
) -> Moves[Tensor]:
    """Return this rank's chunk of the sum of every rank's `values`, as a new tensor.

    Args:
        values: 1-D, of any dtype; each chunk of it is whole blocks.
        dtype: of the sum, which is rounded to it once.
    """
    sent = _empty(values, values.numel(), blocks)
    encode(values, blocks, sent)
    received = torch.empty_like(sent)
    each = [sent.numel() // along.size] * along.size
    yield from along.all_to_all(sent, each, received, each, "reduce_scatter")
    total = outlives_chain(lambda: values.new_empty(values.numel() // along.size, dtype=dtype))
    chunks = received.view(along.size, -1)
    _add_decoded(chunks, blocks, total)
    return total


def sum_everywhere(along: Collectives, values: Tensor, blocks: BlockCodes) -> Moves[None]:
    """Replace `values`, 1-D, fp32, of whole blocks, by the sum of every rank's; all take the same blocks."""
    rows = values.new_empty(along.size, blocks.size_bytes(values.numel()), dtype=torch.uint8)
    encode_all(values, blocks, rows[along.rank])
    if along.size > 1:
        yield from along.all_gather(rows.view(-1))
    _add_decoded(rows, blocks, values)


def gather_sums(along: Collectives, own: Tensor, blocks: BlockCodes, encode: Encode) -> Moves[Tensor]:
    """Return every rank's `own` in one new tensor of the same dtype. All ranks have what the blocks stand for."""
    numel = own.numel() * along.size
    message = _empty(own, numel, blocks)
    encode(own, blocks, message.view(along.size, -1)[along.rank])
    yield from along.all_gather(message, "all_reduce")
    whole = outlives_chain(lambda: own.new_empty(numel))
    for part, coded in blocks.tiles(whole):
        whole[part] = blocks.decode(message[coded])
    return whole


def encode_all(values: Tensor, blocks: BlockCodes, into: Tensor) -> None:
    """Replace the blocks `into` by those of `values`, a tile at a time."""
    for part, coded in blocks.tiles(values):
        blocks.encode(values[part], into[coded])


def _add_decoded(rows: Tensor, blocks: BlockCodes, into: Tensor) -> None:
    """Replace `into` by the sum of what the blocks of each row stand for, in fp32 and in the order of rows."""
    for part, coded in blocks.tiles(into):
        summed = blocks.decode(rows[0, coded])
        for row in rows[1:]:
            summed += blocks.decode(row[coded])
        into[part] = summed


def _empty(like: Tensor, numel: int, blocks: BlockCodes) -> Tensor:
    return like.new_empty(blocks.size_bytes(numel), dtype=torch.uint8)
