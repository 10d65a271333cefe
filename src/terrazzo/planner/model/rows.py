"""The words in which a model family is declared: rows of tensors whose dimensions are named sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from terrazzo.planner.model.shapes import MatrixSplit, Role

__all__ = [
    "QUERY_KEY_NORM",
    "RESULT_NORM",
    "Architecture",
    "BufferRow",
    "Rows",
    "TensorRow",
    "attention",
    "embedding",
    "experts",
    "fused_attention",
    "latent_attention",
    "linear",
    "mixture",
    "mlp",
    "norms",
    "positions",
    "router",
    "swiglu",
    "transposed",
    "uncut",
]


@dataclass(frozen=True)
class TensorRow:
    """A tensor whose dimensions are named sizes. `when` is a flag that it needs, or with `not ` one that it bars.

    `linear`: see `TensorShape`. What a `linear` layer makes of the size "kv" is of key heads.
    """

    name: str
    shape: tuple[str, ...]
    role: Role
    split: MatrixSplit = "none"
    when: str = ""
    linear: bool | None = None
    of_key_heads: bool = False


Rows = tuple[TensorRow, ...]

QUERY_KEY_NORM = re.compile(r"\b(q|k|qk|query|key)_(layer)?norm\b")
RESULT_NORM = re.compile(r"\bpost_(feedforward|ff|mlp)_(layer)?norm\b")
"""Usual names of norms of queries and keys, and of what an MLP gives, beside which that of attention is normed too."""


class BufferRow(NamedTuple):
    """Buffers whose dimensions are named sizes, and bytes of an element of all of them."""

    shape: tuple[str, ...]
    element_bytes: int


@dataclass(frozen=True)
class Architecture:
    """One model family: all that is known of it, a row of `FAMILIES`.

    Attributes:
        blocks: name of the module list that holds the blocks.
        root: what stands before and after the blocks; the head is added where it is not tied.
        attention, mlp, norms: tensors of a block. `sparse` takes the place of `mlp` in a layer with routed experts.
        order: a block's modules as they are registered, where that is not the order above.
        head: the module name of the output head.
        keys: the config's key for a size, where it is not the usual one of `fields.USUAL_KEYS`; empty: it has none.
        defaults: what the config class assumes for a missing key. A size without one must be given.
        gated, heads_first, fp32_router, norm, torch_norm, wide_norm, eager, clamped, one_key: see `BlockShape`.
        bare_norms: norms of a block that have no tensors.
        drops_scores: whether what the config drops of scores is dropped, or the flag without which it is not.
        masks: what torch's attention is given a mask for: `windows`, whole sequences too (`all`), or nothing.
        rotary: share of a head's channels that a rotary embedding turns, where the config says no other; 0: the family
            has none, but learned positions or a bias of attention.
        parallel: whether attention and MLP have the same input, or the flag that says so.
        windowed: every n-th layer sees the whole sequence and the others a window; 0: all see a window.
        position_offset: rows of a table of positions that come before the first one.
        buffers: buffers around the blocks; `sparse_buffers` are those of a layer with routed experts.
        further: globs of what a config says beside sizes, where it may say no more; None: whatever it likes.
        assumes: keys whose other values add or drop tensors which these rows do not describe.
        assumes_width: keys likewise, whose value has to be the width of the residual stream.
    """

    blocks: str
    root: Rows
    attention: Rows
    mlp: Rows
    norms: Rows
    sparse: Rows = ()
    order: tuple[str, ...] = ()
    head: str = "lm_head"
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int | float | bool | str | None] = field(default_factory=dict)
    gated: bool = True
    heads_first: bool = False
    fp32_router: bool = False
    rotary: float = 1.0
    parallel: bool | str = False
    norm: Literal["rms", "layer"] = "rms"
    bare_norms: int = 0
    torch_norm: bool = False
    wide_norm: bool = False
    eager: bool = False
    clamped: bool = False
    drops_scores: bool | str = True
    one_key: bool = False
    masks: Literal["windows", "all", ""] = "windows"
    windowed: int = 0
    position_offset: int = 0
    buffers: tuple[BufferRow, ...] = ()
    sparse_buffers: tuple[BufferRow, ...] = ()
    further: tuple[str, ...] | None = None
    assumes: Mapping[str, object] = field(default_factory=dict)
    assumes_width: tuple[str, ...] = ()


def linear(name: str, out: str, into: str, split: MatrixSplit, bias: str | bool = False) -> Rows:
    """A matrix `[out, into]`, and its bias when the flag `bias` is set. A bias is cut where the output is."""
    of_key_heads = out == "kv"
    weight = TensorRow(f"{name}.weight", (out, into), "matrix", split, of_key_heads=of_key_heads)
    if bias is False:
        return (weight,)
    cut: MatrixSplit = split if split in ("column", "column_gathered") else "none"
    when = "" if bias is True else bias
    return weight, TensorRow(f"{name}.bias", (out,), "vector", cut, when, of_key_heads=of_key_heads)


def transposed(rows: Rows) -> Rows:
    """The rows with matrices kept as `[into, out]`, in modules that are no `nn.Linear`, as GPT-2 has them."""
    return tuple(replace(r, shape=tuple(reversed(r.shape)), linear=False if r.role == "matrix" else None) for r in rows)


def norms(
    *names: str, size: str = "hidden", bias: str | bool = False, split: MatrixSplit = "none", when: str = ""
) -> Rows:
    """The weights of normalisation layers, and their biases."""
    rows: Rows = ()
    for name in names:
        rows += (TensorRow(f"{name}.weight", (size,), "vector", split, when),)
        if bias is not False:
            rows += (TensorRow(f"{name}.bias", (size,), "vector", split, when if bias is True else bias),)
    return rows


def embedding(name: str, split: MatrixSplit = "vocab") -> Rows:
    """The matrix that tokens are looked up in."""
    return (TensorRow(f"{name}.weight", ("vocab", "hidden"), "embedding", split),)


def positions(name: str) -> Rows:
    """The table of learned positions, which are added to a token and never multiplied with it."""
    return (TensorRow(f"{name}.weight", ("position_rows", "hidden"), "vector"),)


def experts(name: str, transposed: bool = False, bias: bool = False) -> Rows:
    """All routed experts of a layer in two stacks, and their biases."""
    shapes: tuple[tuple[str, ...], ...] = (("experts", "expert_gate_up", "hidden"), ("experts", "hidden", "expert_ffn"))
    if transposed:
        shapes = (("experts", "hidden", "expert_gate_up"), ("experts", "expert_ffn", "hidden"))
    up, down = shapes
    first = TensorRow(f"{name}.gate_up_proj", up, "expert", "column")
    second = TensorRow(f"{name}.down_proj", down, "expert", "row")
    if not bias:
        return first, second
    biases = (
        TensorRow(f"{name}.gate_up_proj_bias", ("experts", "expert_gate_up"), "expert", "column"),
        TensorRow(f"{name}.down_proj_bias", ("experts", "hidden"), "expert"),
    )
    return first, biases[0], second, biases[1]


def router(name: str) -> Rows:
    """The matrix that scores a layer's experts."""
    return (TensorRow(f"{name}.weight", ("experts", "hidden"), "router"),)


def mixture(name: str) -> Rows:
    """The built-in decoder's experts: router, three stacks, and as one feed-forward those that meet every token."""
    up, down = ("expert_ffn", "hidden"), ("hidden", "expert_ffn")
    shapes = {"gate": up, "up": up, "down": down}
    stacks = tuple(TensorRow(f"{name}.experts.{each}", ("experts", *shape), "expert") for each, shape in shapes.items())
    up, down = ("shared_ffn", "hidden"), ("hidden", "shared_ffn")
    shapes = {"gate": up, "up": up, "down": down}
    shared = (
        TensorRow(f"{name}.shared.{key}.weight", each, "matrix", when="shared_ffn") for key, each in shapes.items()
    )
    return (*router(f"{name}.router"), *stacks, *shared)


def attention(
    qkv_bias: str | bool = False,
    out_bias: str | bool = False,
    module: str = "self_attn",
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> Rows:
    """Four matrices of grouped-query attention, by default under Llama's names."""
    query, key, value, out = (f"{module}.{name}" for name in names)
    return (
        *linear(query, "q", "hidden", "column", qkv_bias),
        *linear(key, "kv", "hidden", "column", qkv_bias),
        *linear(value, "kv", "hidden", "column", qkv_bias),
        *linear(out, "hidden", "q", "row", out_bias),
    )


def latent_attention(module: str = "self_attn") -> Rows:
    """Multi-head latent attention (arXiv 2405.04434) under DeepSeek's names."""
    return (
        TensorRow(f"{module}.q_proj.weight", ("qk", "hidden"), "matrix", "column", "not q_lora"),
        TensorRow(f"{module}.q_a_proj.weight", ("q_lora", "hidden"), "matrix", "none", "q_lora"),
        TensorRow(f"{module}.q_a_proj.bias", ("q_lora",), "vector", "none", "q_lora_bias"),
        TensorRow(f"{module}.q_a_layernorm.weight", ("q_lora",), "vector", "none", "q_lora"),
        TensorRow(f"{module}.q_b_proj.weight", ("qk", "q_lora"), "matrix", "column", "q_lora"),
        *linear(f"{module}.kv_a_proj_with_mqa", "kv_latent", "hidden", "none", "attention_bias"),
        TensorRow(f"{module}.kv_a_layernorm.weight", ("kv_lora",), "vector"),
        TensorRow(f"{module}.kv_b_proj.weight", ("kv_up", "kv_lora"), "matrix", "column"),
        *linear(f"{module}.o_proj", "hidden", "values", "row", "attention_bias"),
    )


def swiglu(
    bias: str | bool = False,
    module: str = "mlp",
    width: str = "ffn",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Rows:
    """A gated MLP (arXiv 2002.05202), by default under Llama's names."""
    gate, up, down = (f"{module}.{name}" for name in names)
    return (
        *linear(gate, width, "hidden", "column", bias),
        *linear(up, width, "hidden", "column", bias),
        *linear(down, "hidden", width, "row", bias),
    )


def uncut(rows: Rows) -> Rows:
    """The rows as tensor-parallel ranks have them whole, where transformers' plan leaves them so."""
    return tuple(replace(row, split="none") for row in rows)


def mlp(up: str, down: str, bias: str | bool = True) -> Rows:
    """A plain MLP of two matrices."""
    return linear(up, "ffn", "hidden", "column", bias) + linear(down, "hidden", "ffn", "row", bias)


def fused_attention(qkv: str, out: str, bias: str | bool = True) -> Rows:
    """Attention whose queries, keys and values come from one matrix."""
    return linear(qkv, "qkv", "hidden", "column", bias) + linear(out, "hidden", "q", "row", bias)
