"""Matrix products of a block: their floating-point operations, and what devices lose to their shapes."""

from __future__ import annotations

import math
from typing import NamedTuple

from terrazzo.planner.caching import once
from terrazzo.planner.figures import Formula
from terrazzo.planner.model.shapes import BlockShape, TensorShape, active_share, parts_along_tp

__all__ = ["FORMULAS", "Shares", "block_products", "product", "products_of"]

DEPTH = 128
"""Elements of a product's inner dimension that cost as much as filling and draining its pipeline. With what is below,
products of 1,024 to 16,384 rows on an A100 are within 11 % of Azure/AI-benchmarking-guide's."""

HALF_WAVE = 108 * 128 * 128 / 2
"""Elements of a product's result by which the last round of tiles leaves a device empty, on average: half of what 108
multiprocessors work on at once in tiles of 128 x 128."""


TILE = 128
"""Rows and columns of a result that are computed together, or half of them where there are no more: what is left over
of a tile is computed too. A product of [802816, 768] and [768, 192] reaches 158 of 257 TFLOP/s on an A100."""

ALIGNED, UNALIGNED_COST = 8, 2
"""Elements of 16 bits that are loaded at once, and how many times as long products take whose widths are no multiple of
it: GPT-2 with a vocabulary of 50,304 instead of 50,257 trains 25 % faster (karpathy/nanoGPT)."""


FORMULAS = {
    "time.matmul": Formula(
        f"pace * flops / sustained_flops; a product of [m, k] and [k, n] counts 2 * (m * n + {HALF_WAVE / 1e6:.1f}e6) "
        f"* (k + {DEPTH}), with what it loses by its shape, m and n in whole tiles of {TILE}, and {UNALIGNED_COST} "
        f"times that where a width is no multiple of {ALIGNED}; pace is 1 until measured",
        "largest measured rate (stas00/ml-engineering, MAMF) times what a step keeps up of it; set on MosaicML's runs",
    ),
}


class Shares(NamedTuple):
    """What a rank computes of a block.

    Attributes:
        tokens: tokens of one micro-batch in matrices of which ranks along tp have parts.
        own_tokens: the same in matrices that all of them have, and in the router.
        tp, ep: ranks along these axes.
        whole_experts: whether ranks along tp have whole experts, and each its own tokens for them.
    """

    tokens: float
    own_tokens: float
    tp: int
    ep: int
    whole_experts: bool


@once
def block_products(tensors: tuple[TensorShape, ...], block: BlockShape, shares: Shares, in_tiles: bool) -> float:
    """FLOPs of all products of a block on one rank, and what is lost to their shapes counted as FLOPs.

    Args:
        in_tiles: whether many multiprocessors share a product's result, and the last round leaves some without work.
    """
    work = 0.0
    for tensor in tensors:
        if tensor.role in ("matrix", "router"):
            apart = tensor.role == "router" or (block.experts and tensor.split == "none" and not block.latent)
            tokens = shares.own_tokens if apart else shares.tokens
            work += _products(tensor, block, tokens, in_tiles, shares)
        elif tensor.role == "expert":
            tokens = shares.own_tokens * shares.ep  # from all expert ranks
            met = tokens * active_share(tensor, block)  # by each of this rank's experts
            work += _products(tensor, block, met, in_tiles, shares, shares.ep)
    return work


def _products(
    tensor: TensorShape, block: BlockShape, tokens: float, in_tiles: bool, shares: Shares, ep: int = 1
) -> float:
    """FLOPs of forward, input gradient and weight gradient of one matrix, or of a stack of experts in grouped products.

    Where there are fewer key heads than ranks along tp, each rank has all, and computes one.
    """
    parts = parts_along_tp(tensor, block, shares.tp, shares.whole_experts)
    tp = min(shares.tp, block.kv_heads) if tensor.of_key_heads else parts
    out, inner = map(float, _out_and_in(tensor, block.hidden))
    stack = tensor.numel / (out * inner) / ep
    out, inner = out / (tp if tensor.split in _OUT else 1), inner / (tp if tensor.split in _INTO else 1)
    return products_of(stack, tokens, out, inner, tensor.trainable, in_tiles)


def products_of(stack: float, tokens: float, out: float, inner: float, trained: bool, in_tiles: bool) -> float:
    """FLOPs of forward, input gradient and, if it is `trained`, weight gradient of a matrix of [out, inner]."""
    of_one = product if in_tiles else _plain_product
    work = of_one(stack, tokens, out, inner) + of_one(stack, tokens, inner, out)
    work += of_one(stack, out, inner, tokens) if trained else 0.0
    return work * (UNALIGNED_COST if in_tiles and (out % ALIGNED or inner % ALIGNED) else 1)


_OUT, _INTO = ("column", "column_gathered"), ("row", "row_splits")
"""Splits of a matrix by its outputs, and by its inputs."""


def _out_and_in(tensor: TensorShape, hidden: int) -> tuple[int, int]:
    """Outputs and inputs of a matrix. Most are stored [out, in]; GPT-2's and some experts' [in, out].

    Between the residual stream and what tensor parallelism splits, the side that is not `hidden` is the split one.
    """
    out, inner = tensor.shape[-2:]
    split = out if tensor.split in _OUT else inner if tensor.split in _INTO else None
    return (inner, out) if split == hidden and out != inner else (out, inner)


def product(stack: float, rows: float, columns: float, depth: float) -> float:
    """FLOPs of `stack` products of [rows, depth] and [depth, columns], and what is lost to their shapes."""
    return 2 * (stack * _in_tiles(rows) * _in_tiles(columns) + HALF_WAVE) * (depth + DEPTH)


def _in_tiles(width: float) -> float:
    tile = TILE if width > TILE / 2 else TILE / 2
    return math.ceil(width / tile) * tile


def _plain_product(stack: float, rows: float, columns: float, depth: float) -> float:
    return 2 * stack * rows * columns * depth
