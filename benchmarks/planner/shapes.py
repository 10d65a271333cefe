"""Model shapes from the sizes that a published row gives: GPT blocks (MPT, Megatron, GPT-2) and Llama-like ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from terrazzo.planner.model.shapes import BlockShape, MatrixSplit, ModelShape, TensorShape, UnitShape

__all__ = ["Sizes", "transformer"]


@dataclass(frozen=True)
class Sizes:
    """What a decoder is made of. `learned` position embeddings, 0 for none; `rotary`: it rotates whole heads."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool = False
    norm: Literal["rms", "layer"] = "layer"
    bias: bool = True
    tied: bool = True
    learned: int = 0
    rotary: bool = False
    dropout: bool = False


def transformer(sizes: Sizes) -> ModelShape:
    """Embedding, `layers` equal blocks, final norm and head."""
    block = BlockShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        ffn=sizes.ffn,
        gated=sizes.gated,
        rotated=sizes.hidden // sizes.heads if sizes.rotary else 0,
        norm=sizes.norm,
        dropout=sizes.dropout,
        attention_dropout=sizes.dropout,
    )
    root = [TensorShape("embedding", (sizes.vocab, sizes.hidden), "embedding", "vocab")]
    if sizes.learned:
        root.append(TensorShape("positions", (sizes.learned, sizes.hidden), "embedding"))
    root += _norm("final_norm", sizes)
    if not sizes.tied:
        root.append(TensorShape("head", (sizes.vocab, sizes.hidden), "head", "vocab"))
    units = (UnitShape("", tuple(root)), UnitShape("block", tuple(_block(sizes)), sizes.layers, block))
    return ModelShape(sizes.name, units, vocab=sizes.vocab, tied=sizes.tied)


def _block(sizes: Sizes) -> list[TensorShape]:
    hidden, kv = sizes.hidden, sizes.hidden // sizes.heads * sizes.kv_heads
    tensors = [*_norm("attention_norm", sizes), *_linear("q", hidden, hidden, "column", sizes.bias)]
    for name in ("k", "v"):
        tensors += _linear(name, kv, hidden, "column", sizes.bias)
    tensors += [*_linear("out", hidden, hidden, "row", sizes.bias), *_norm("ffn_norm", sizes)]
    for name in ("gate", "up") if sizes.gated else ("up",):
        tensors += _linear(name, sizes.ffn, hidden, "column", sizes.bias)
    return [*tensors, *_linear("down", hidden, sizes.ffn, "row", sizes.bias)]


def _linear(name: str, rows: int, columns: int, split: MatrixSplit, bias: bool) -> list[TensorShape]:
    tensors = [TensorShape(f"{name}.weight", (rows, columns), "matrix", split)]
    if bias:
        tensors.append(TensorShape(f"{name}.bias", (rows,), "vector", "column" if split == "column" else "none"))
    return tensors


def _norm(name: str, sizes: Sizes) -> list[TensorShape]:
    parts = ["weight", "bias"] if sizes.norm == "layer" and sizes.bias else ["weight"]
    return [TensorShape(f"{name}.{part}", (sizes.hidden,), "vector") for part in parts]
