"""The built-in decoder in the words of `rows`. Its config is this project's own, so that all keys are known."""

from __future__ import annotations

from terrazzo.planner.model.rows import Architecture, BufferRow, attention, embedding, mixture, norms, swiglu

__all__ = ["DECODER"]

DECODER = Architecture(
    blocks="blocks",
    root=embedding("embedding") + norms("norm"),
    attention=attention(module="attention", names=("query", "key", "value", "output")),
    mlp=swiglu(module="feed_forward", names=("gate", "up", "down")),
    sparse=mixture("feed_forward"),
    norms=norms("attention_norm", "feed_forward_norm"),
    order=("attention_norm", "attention", "feed_forward_norm", "feed_forward"),
    head="head",
    heads_first=True,
    fp32_router=True,
    torch_norm=True,
    masks="",  # windows are tiles
    buffers=(BufferRow(("positions", "head_dim"), 4),),  # cosines and sines of half the channels
    sparse_buffers=(BufferRow(("experts",), 4 + 8), BufferRow(("one",), 16)),  # bias, load and entropy of a router
    keys={
        "hidden": "dim",
        **{name: name for name in ("layers", "heads", "kv_heads")},
        "ffn": "ffn_dim",
        "positions": "max_sequence_length",
        "tied": "tie_embeddings",
    },
    defaults={"tied": True, "shared_experts": 0, "window": None, "stride": None, "prefix": False},
    further=("model_type", "sliding_window_pattern", "rope_theta", "norm_eps", "dropout", "router_*"),
)
"""The decoder of `terrazzo.train.model`."""
