"""Matrix products of a block: their floating-point operations, and what devices lose to their shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from terrazzo.planner.model.shapes import BlockShape, TensorShape, active_share

__all__ = ["Shares", "block_products"]

DEPTH = 128
"""Filling and draining the pipeline of a product costs as much as so many more elements of its inner dimension."""

HALF_WAVE = 108 * 128 * 128 / 2
"""Elements of a product's result by which the last round of tiles leaves a device empty, on average: half of what 108
multiprocessors work on at once in tiles of 128 x 128."""


class Shares(NamedTuple):
    """What a rank computes of a block.

    Attributes:
        tokens: that it meets in matrices of which ranks along tp have parts.
        own_tokens: in matrices that all of them have, and in the router.
        tp, ep: ranks along these axes.
        expert_tp: those of tp that have parts of each expert; else each has whole ones, and its own tokens.
    """

    tokens: float
    own_tokens: float
    tp: int
    ep: int
    expert_tp: int


@lru_cache(maxsize=4096)
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
            work += _products(tensor, block.hidden, tokens, in_tiles, shares.tp)
        elif tensor.role == "expert":
            tokens = shares.own_tokens * shares.ep  # from all expert ranks
            met = tokens * active_share(tensor, block)  # by each of this rank's experts
            work += _products(tensor, block.hidden, met, in_tiles, shares.expert_tp, shares.ep)
    return work


def _products(tensor: TensorShape, hidden: int, tokens: float, in_tiles: bool, tp: int, ep: int = 1) -> float:
    """Forward, input gradient and weight gradient of one matrix, or of a stack of experts in grouped products."""
    out, inner = map(float, _out_and_in(tensor, hidden))
    stack = tensor.numel / (out * inner) / ep
    out, inner = out / (tp if tensor.split in _OUT else 1), inner / (tp if tensor.split in _INTO else 1)
    product = _product if in_tiles else _plain_product
    work = product(stack, tokens, out, inner) + product(stack, tokens, inner, out)
    return work + (product(stack, out, inner, tokens) if tensor.trainable else 0.0)


_OUT, _INTO = ("column", "column_gathered"), ("row", "row_splits")
"""Splits of a matrix by its outputs, and by its inputs."""


def _out_and_in(tensor: TensorShape, hidden: int) -> tuple[int, int]:
    """Outputs and inputs of a matrix. Most are stored [out, in]; GPT-2's and some experts' [in, out].

    Between the residual stream and what tensor parallelism splits, the side that is not `hidden` is the split one.
    """
    out, inner = tensor.shape[-2:]
    split = out if tensor.split in _OUT else inner if tensor.split in _INTO else None
    return (inner, out) if split == hidden and out != inner else (out, inner)


def _product(stack: float, rows: float, columns: float, depth: float) -> float:
    return 2 * (stack * rows * columns + HALF_WAVE) * (depth + DEPTH)


def _plain_product(stack: float, rows: float, columns: float, depth: float) -> float:
    return 2 * stack * rows * columns * depth
