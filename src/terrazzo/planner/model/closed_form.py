"""The shape of a model from its Hugging Face config, in closed form: no framework, no weights, no code of the model's.

Every field that decides a shape is checked, since a config may come from anyone; all other fields are ignored, but for
one that looks like a missing one misspelt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.fields import ATTENTION_DROPOUTS, RESULT_DROPOUTS, Fields
from terrazzo.planner.model.rows import QUERY_KEY_NORM, RESULT_NORM, Architecture, BufferRow, Rows, TensorRow
from terrazzo.planner.model.shapes import BUILT_IN, BlockShape, ModelShape, TensorShape, UnitShape

__all__ = ["closed_form", "family_name", "merged", "shape_of_config", "units_of_config"]

Sizes = Mapping[str, int]


def closed_form(values: Mapping[str, Any]) -> Architecture | None:
    """The family that describes all tensors of this config, or None when the model must be built to know them."""
    family = FAMILIES.get(family_name(values))
    if family is None:
        return None
    width = values.get(family.keys.get("hidden", "hidden_size"))
    assumed = {**family.assumes, **dict.fromkeys(family.assumes_width, width)}
    return family if all(values.get(key) in (None, wanted) for key, wanted in assumed.items()) else None


def family_name(values: Mapping[str, Any]) -> str:
    """The config's `model_type`; one without, in the terms of the built-in decoder, is that."""
    model_type = values.get("model_type")
    if model_type is None and "dim" in values:
        return BUILT_IN
    return model_type if isinstance(model_type, str) else ""


def shape_of_config(values: Mapping[str, Any], name: str) -> ModelShape:
    """All tensors of the model that `values`, the contents of a config.json, describes.

    Layers that differ only in how far attention looks back, or in a rotary embedding, stand in two groups.

    Raises:
        BadInput: a field that is missing, of the wrong type, or out of bounds; or a family without a closed form.
    """
    fields, sizes = _read(values, name)
    root, *layers = _units(fields, sizes)
    tied, units = fields.flag("tied"), (root, *merged(layers))
    capped = fields.soft_cap("final_logit_softcapping")
    positions = sizes["positions"] or None
    return ModelShape(name, units, sizes["vocab"], tied, positions, family=family_name(values), capped=capped)


def units_of_config(values: Mapping[str, Any], name: str) -> list[UnitShape]:
    """The root of the model that `values` describes, and every layer in order, each on its own.

    Raises as `shape_of_config`.
    """
    return _units(*_read(values, name))


def merged(units: Iterable[UnitShape]) -> list[UnitShape]:
    """Units in a row with the same tensors, counted; where only their blocks differ, like stands with like."""
    groups = []
    for _, run in groupby(units, key=lambda unit: unit.tensors):
        alike: dict[tuple[BlockShape | None, int], list[UnitShape]] = {}
        for unit in run:
            alike.setdefault((unit.block, unit.buffer_bytes), []).append(unit)
        groups += [replace(same[0], count=len(same)) for same in alike.values()]
    return groups


def _units(fields: Fields, sizes: Sizes) -> list[UnitShape]:
    """The root and each layer."""
    return [_root(fields, sizes), *_layers(fields, sizes)]


def _read(values: Mapping[str, Any], name: str) -> tuple[Fields, dict[str, int]]:
    family = closed_form(values)
    if family is None:
        raise BadInput(f"{name}: model_type {values.get('model_type')!r} has no closed form here.")
    fields = Fields(values, family, name)
    fields.check_spelling()
    return fields, _sizes_of(fields)


def _sizes_of(fields: Fields) -> dict[str, int]:
    """Every size and flag that a family's rows may name.

    Raises:
        BadInput: as `shape_of_config`.
    """
    sizes = {name: fields.required(name) for name in ("hidden", "layers", "heads", "vocab")}
    sizes["positions"] = fields.integer("positions") or 0
    sizes |= _attention_sizes(fields, sizes) | _mlp_sizes(fields, sizes)
    for flag in _flags(fields.family):
        if flag not in sizes:
            sizes[flag] = fields.flag(flag)
    sizes["q_lora_bias"] = bool(sizes["q_lora"] and fields.flag("attention_bias"))
    sizes["one"] = 1
    sizes["position_rows"] = sizes["positions"] + fields.family.position_offset
    return sizes


def _attention_sizes(fields: Fields, sizes: Sizes) -> dict[str, int]:
    heads, latent = sizes["heads"], "kv_lora" in fields.family.defaults
    kv_heads = heads if latent else _kv_heads(fields, heads)
    if heads % kv_heads:
        raise fields.refused(
            "kv_heads",
            f"which does not divide the {heads} query heads ({fields.key('heads')}) into equal groups. Give a divisor "
            f"of {heads}",
        )
    if latent:
        return {"kv_heads": heads} | _latent_sizes(fields, heads)
    head_dim = fields.integer("head_dim") or _even_split(fields, sizes)
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "q": heads * head_dim,
        "kv": kv_heads * head_dim,
        "qkv": (heads + 2 * kv_heads) * head_dim,
        "q_lora": 0,
        "latent": 0,
        "kv_latent": 0,
    }


def _kv_heads(fields: Fields, heads: int) -> int:
    if "multi_query" in fields.family.defaults and not fields.flag("new_decoder_architecture"):
        return 1 if fields.flag("multi_query") else heads
    return fields.integer("kv_heads") or heads


def _even_split(fields: Fields, sizes: Sizes) -> int:
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise fields.refused(
            "hidden",
            f"which does not split evenly over {heads} heads ({fields.key('heads')}). Give a multiple of {heads}, or "
            "head_dim where the family has one",
        )
    return hidden // heads


def _latent_sizes(fields: Fields, heads: int) -> dict[str, int]:
    """Sizes of multi-head latent attention (arXiv 2405.04434)."""
    q_lora, kv_lora = fields.integer("q_lora") or 0, fields.required("kv_lora")
    rope, nope, value = (fields.required(name) for name in ("rope_dim", "nope_dim", "value_dim"))
    return {
        "head_dim": nope + rope,
        "value_dim": value,
        "q_lora": q_lora,
        "kv_lora": kv_lora,
        "qk": heads * (nope + rope),
        "values": heads * value,
        "kv_latent": kv_lora + rope,
        "kv_up": heads * (nope + value),
        "latent": q_lora + kv_lora + rope,
    }


def _mlp_sizes(fields: Fields, sizes: Sizes) -> dict[str, int]:
    family = fields.family
    ffn = fields.integer("ffn")
    if ffn is None:
        ffn = 4 * sizes["hidden"] if "ffn" in family.defaults else fields.required("ffn")
    dense = {"ffn": ffn, "gate_up": 2 * ffn, "experts": 0, "active": 0, "expert_ffn": 0, "shared_ffn": 0}
    experts = (fields.integer("experts") or 0) if family.sparse else 0
    if not experts:
        return dense
    active, expert_ffn = fields.required("active"), fields.required("expert_ffn")
    if active > experts:
        raise fields.refused("active", f"more than the {experts} experts ({fields.key('experts')}) that there are")
    shared_ffn = fields.integer("shared_ffn") if "shared_ffn" in family.defaults else None
    shared_experts = fields.integer("shared_experts") if "shared_experts" in family.defaults else None
    return dense | {
        "experts": experts,
        "active": active,
        "expert_ffn": expert_ffn,
        "expert_gate_up": 2 * expert_ffn,
        "shared_ffn": shared_ffn or (shared_experts or 0) * expert_ffn,
    }


def _flags(family: Architecture) -> set[str]:
    rows = (*family.root, *family.attention, *family.mlp, *family.norms, *family.sparse)
    return {row.when.removeprefix("not ") for row in rows if row.when}


def _head(family: Architecture) -> Rows:
    return (TensorRow(f"{family.head}.weight", ("vocab", "hidden"), "head", "vocab"),)


def _root(fields: Fields, sizes: Sizes) -> UnitShape:
    family = fields.family
    beside = tuple(row for row in family.root if row.name.startswith(f"{family.head}."))
    head = () if fields.flag("tied") else _head(family)
    rows = tuple(row for row in family.root if row not in beside) + head + beside
    return UnitShape("", _tensors(rows, sizes), buffer_bytes=_buffer_bytes(family.buffers, sizes))


def _buffer_bytes(rows: Iterable[BufferRow], sizes: Sizes) -> int:
    return sum(row.element_bytes * math.prod(sizes[size] for size in row.shape) for row in rows)


def _tensors(rows: Rows, sizes: Sizes) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(
            row.name,
            tuple(sizes[size] for size in row.shape),
            row.role,
            row.split,
            linear=row.linear,
            of_key_heads=row.of_key_heads,
        )
        for row in rows
        if _wanted(row, sizes)
    )


def _wanted(row: TensorRow, sizes: Sizes) -> bool:
    if not row.when:
        return True
    return not sizes[row.when[4:]] if row.when.startswith("not ") else bool(sizes[row.when])


def _layers(fields: Fields, sizes: Sizes) -> Iterator[UnitShape]:
    family = fields.family
    dense = _tensors(_in_order(family, family.mlp), sizes)
    sparse = _tensors(_in_order(family, family.sparse), sizes) if sizes["experts"] else ()
    block, layers = cache(partial(_block, fields, sizes)), sizes["layers"]
    kinds = zip(_sparse_layers(fields, sizes), fields.windows(layers), fields.rotating(layers), strict=True)
    buffer_bytes = _buffer_bytes(family.sparse_buffers, sizes)
    for layer, (routed, window, rotates) in enumerate(kinds):
        yield UnitShape(
            f"{family.blocks}.{layer}",
            sparse if routed else dense,
            block=block(routed, window, rotates),
            buffer_bytes=buffer_bytes * routed,
        )


def _in_order(family: Architecture, mlp: Rows) -> Rows:
    """The rows of a block as its modules are registered."""
    rows = family.attention + mlp + family.norms
    places = {name: place for place, name in enumerate(family.order)}
    return tuple(sorted(rows, key=lambda row: places[row.name.partition(".")[0]])) if places else rows


def _sparse_layers(fields: Fields, sizes: Sizes) -> list[bool]:
    """Which layers have routed experts."""
    layers, defaults = sizes["layers"], fields.family.defaults
    if not sizes["experts"]:
        return [False] * layers
    dense = (fields.integer("dense_layers") or 0) if "dense_layers" in defaults else 0
    step = fields.required("sparse_step") if "sparse_step" in defaults else 1
    dense_only = fields.chosen_layers("mlp_only_layers", layers) if "sparse_step" in defaults else set()
    return [layer >= dense and layer not in dense_only and (layer + 1) % step == 0 for layer in range(layers)]


def _block(fields: Fields, sizes: Sizes, sparse: bool, window: int | None, rotates: bool) -> BlockShape:
    family = fields.family
    return BlockShape(
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["value_dim"],
        rotated=fields.rotated(sizes["head_dim"]) if rotates else 0,
        fused_qkv=any("qkv" in row.shape for row in family.attention),
        heads_first=family.heads_first,
        parallel=fields.has(family.parallel),
        ffn=sizes["expert_ffn"] if sparse else sizes["ffn"],
        gated=family.gated,
        experts=sizes["experts"] if sparse else 0,
        active_experts=sizes["active"] if sparse else 0,
        shared_ffn=sizes["shared_ffn"] if sparse else 0,
        shared_gate=sparse and any(row.name.endswith("shared_expert_gate.weight") for row in family.sparse),
        fp32_router=sparse and family.fp32_router,
        norm=family.norm,
        norms=sum(row.name.endswith(".weight") and _wanted(row, sizes) for row in family.norms) + family.bare_norms,
        query_key_norms=any(QUERY_KEY_NORM.search(row.name) for row in family.attention),
        result_norms=any(RESULT_NORM.search(row.name) for row in family.norms),
        dropout=fields.drops(RESULT_DROPOUTS),
        attention_dropout=fields.drops(ATTENTION_DROPOUTS) and fields.has(family.drops_scores),
        window=window,
        stride=fields.integer("stride") if window and "stride" in family.defaults else None,
        prefix="prefix" in family.defaults and fields.flag("prefix"),
        latent=sizes["latent"],
        kv_latent=sizes["kv_latent"],
        torch_norm=family.torch_norm,
        nonlinearity=fields.nonlinearity(),
        wide_norm=family.wide_norm,
        soft_cap=fields.soft_cap("attn_logit_softcapping"),
        eager=family.eager,
        clamped=family.clamped,
        sinks=any(row.name.endswith(".sinks") for row in family.attention),
        one_key=family.one_key and sizes["kv_heads"] == 1 and not fields.flag("new_decoder_architecture"),
        masked=family.masks == "all" or (family.masks == "windows" and window is not None),
        whole_attention=_is_put_together(family.attention),
        whole_mlp=_is_put_together(family.mlp) and not sparse,
    )


def _is_put_together(rows: Rows) -> bool:
    return any(row.split == "column_gathered" for row in rows)
