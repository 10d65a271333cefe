"""Models as the planner sees them, written out by hand."""

from __future__ import annotations

from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape


def llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, tied: bool = False) -> ModelShape:
    """Gated MLP, RMS norms, rotary embeddings, grouped queries, no biases."""
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    block = BlockShape(hidden, heads, kv_heads, head_dim, ffn, rotated=head_dim)
    tensors = (
        TensorShape("norm", (hidden,), "vector"),
        TensorShape("q", (hidden, hidden), "matrix", "column"),
        TensorShape("k", (kv, hidden), "matrix", "column"),
        TensorShape("v", (kv, hidden), "matrix", "column"),
        TensorShape("o", (hidden, hidden), "matrix", "row"),
        TensorShape("mlp_norm", (hidden,), "vector"),
        TensorShape("gate", (ffn, hidden), "matrix", "column"),
        TensorShape("up", (ffn, hidden), "matrix", "column"),
        TensorShape("down", (hidden, ffn), "matrix", "row"),
    )
    return _model(tensors, layers, block, vocab, tied)


def gpt(layers: int, hidden: int, heads: int, vocab: int, kv_heads: int | None = None, tied: bool = True) -> ModelShape:
    """Plain MLP of four times the width, layer norms, dropout, biases."""
    kv_heads = kv_heads or heads
    head_dim = hidden // heads
    fused, ffn = hidden + 2 * kv_heads * head_dim, 4 * hidden
    block = BlockShape(
        hidden, heads, kv_heads, head_dim, ffn, gated=False, norm="layer", dropout=True, attention_dropout=True
    )
    tensors = (
        *(TensorShape(name, (hidden,), "vector") for name in ("norm", "norm_bias", "mlp_norm", "mlp_norm_bias")),
        TensorShape("qkv", (fused, hidden), "matrix", "column"),
        TensorShape("qkv_bias", (fused,), "vector", "column"),
        TensorShape("o", (hidden, hidden), "matrix", "row"),
        TensorShape("o_bias", (hidden,), "vector"),
        TensorShape("up", (ffn, hidden), "matrix", "column"),
        TensorShape("up_bias", (ffn,), "vector", "column"),
        TensorShape("down", (hidden, ffn), "matrix", "row"),
        TensorShape("down_bias", (hidden,), "vector"),
    )
    return _model(tensors, layers, block, vocab, tied)


def _model(tensors: tuple[TensorShape, ...], layers: int, block: BlockShape, vocab: int, tied: bool) -> ModelShape:
    root = [TensorShape("embedding", (vocab, block.hidden), "embedding", "vocab")]
    root.append(TensorShape("final_norm", (block.hidden,), "vector"))
    if not tied:
        root.append(TensorShape("head", (vocab, block.hidden), "head", "vocab"))
    units = (UnitShape("", tuple(root)), UnitShape("layers", tensors, layers, block))
    return ModelShape("by hand", units, vocab, tied=tied)
