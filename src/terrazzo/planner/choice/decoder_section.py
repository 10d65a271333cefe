"""The section `model` of the built-in decoder that a plan is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.planner.model.closed_form import shape_of_config
from terrazzo.planner.model.loading import config_file, read_config
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.request import ModelSource

__all__ = ["decoder_section"]

_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
"""What a config calls the sizes of its experts: how many, of a token, their width, and shared ones."""

_NORM_EPS = 1e-5
"""What the decoder's norms add, for which there is no key (`terrazzo.train.model.decoder`)."""


def decoder_section(shape: ModelShape, model: ModelSource) -> dict[str, Any]:
    """The sizes of the shape, and what its config says beside them.

    Args:
        model: what the shape was made from.

    Raises:
        BadInput: the section has no key for what the model is, so that a run would train another one.
    """
    if not shape.blocks:
        raise _no_key(shape, "what its one unit computes is not known")
    block, ffn = shape.blocks[0], {"ffn_dim": shape.blocks[0].ffn}
    sizes = {"vocab_size": shape.vocab, "dim": block.hidden, "layers": shape.layers, "heads": block.heads}
    sizes |= {"kv_heads": block.kv_heads, "tie_embeddings": shape.tied}
    beside = _beside_sizes(shape, _config_of(model))
    section, described = {"kind": "decoder", **sizes}, {**sizes, **ffn, "dropout": beside.get("dropout", 0.0)}
    if attention := _attention(shape):
        section["attention"] = attention
        usual = {"window": "sliding_window", "full_every": "sliding_window_pattern"}
        described |= {usual.get(key, key): value for key, value in attention.items()}
    if block.experts:
        routed = {"count": block.experts, "top_k": block.active_experts, **ffn}
        routed["shared"] = block.shared_ffn // block.ffn
        section["experts"] = routed | beside.pop("experts", {})
        described |= dict(zip(_EXPERTS, routed.values(), strict=True))
    else:
        section |= ffn
    if _computed(shape_of_config(described, shape.name)) != _computed(shape):
        unknown = any(block.dropout for block in shape.blocks) and not described["dropout"]
        raise _no_key(shape, "how much it drops is not known" if unknown else "its layers are not of one pattern")
    return section | beside


def _config_of(model: ModelSource) -> Mapping[str, Any]:
    """What the model's config says; empty where there is none."""
    from terrazzo.planner.model.modules import values_of  # loads what only modules need

    if isinstance(model, Mapping):
        return model
    if isinstance(model, nn.Module):
        return values_of(getattr(model, "config", None))
    if not isinstance(model, str | Path):
        return {}
    return read_config(config_file(Path(model)))


def _attention(shape: ModelShape) -> dict[str, Any]:
    """The section `model.attention`; empty where tokens see all before them."""
    blocks = [(unit.name, unit.block) for unit in shape.repeated if unit.block is not None]
    if any(block.prefix for _, block in blocks):
        return {"prefix": True}
    windowed = next((block for _, block in blocks if block.window), None)
    if windowed is None:
        return {}
    section = {"window": windowed.window} | ({"stride": windowed.stride} if windowed.stride else {})
    full = next((name for name, block in blocks if not block.window), None)
    return section | ({} if full is None else {"full_every": int(full.rpartition(".")[2]) + 1})


def _beside_sizes(shape: ModelShape, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a decoder's config says that its shape does not, by keys of the section, where it is not the default."""
    from terrazzo.config import ModelConfig  # loads pydantic

    if values.get("norm_eps", _NORM_EPS) != _NORM_EPS:
        raise _no_key(shape, f"its norm_eps is {values['norm_eps']!r}, and there is no key for other than {_NORM_EPS}")
    usual = ModelConfig()
    section = {key: values[key] for key in ("rope_theta", "dropout") if key in values}
    section = {key: value for key, value in section.items() if value != getattr(usual, key)}
    routers = {key.removeprefix("router_"): value for key, value in values.items() if key.startswith("router_")}
    others = {key: value for key, value in routers.items() if value != getattr(usual.experts, key, value)}
    return section | ({"experts": others} if others else {})


def _computed(shape: ModelShape) -> list[object]:
    """All that a model with this shape computes; not how long its tables of positions are, which a run decides."""
    units = [
        (unit.count, unit.block, sorted((tensor.name, tensor.shape, tensor.trainable) for tensor in unit.tensors))
        for unit in shape.units
    ]
    return [shape.vocab, shape.tied, *units]


def _no_key(shape: ModelShape, why: str) -> BadInput:
    return BadInput(
        f"`terrazzo train` would build another decoder than {shape.name}: {why}. Change it there, or shard the model in"
        " a loop of your own with tz.shard."
    )
