"""The shape of a model that exists as modules, on any device: the engine's own units, and roles guessed from types."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import Member, UnitSpec, partition
from terrazzo.errors import BadInput
from terrazzo.optim import divided
from terrazzo.planner.model.closed_form import closed_form, family_name, merged, units_of_config
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.fields import ATTENTION_DROPOUTS, RESULT_DROPOUTS, Fields, rotary_share
from terrazzo.planner.model.rows import QUERY_KEY_NORM, RESULT_NORM
from terrazzo.planner.model.shapes import (
    BlockShape,
    MatrixSplit,
    ModelShape,
    Nonlinearity,
    Role,
    TensorShape,
    UnitShape,
)

__all__ = ["shape_of_module", "values_of"]

_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok", "moe_topk", "top_k"),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "window": ("sliding_window",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len", "block_size"),
}
"""Under which names configs of models without a closed form keep a size."""

_ROWS = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "wo", "w2", "fc2", "fc_out", "output", "down")
"""Module names of matrices that bring split activations back to the residual stream."""

_OF_WINDOWS = ("sliding_window", "use_sliding_window", "sliding_window_pattern", "layer_types")
_WINDOWED = replace(FAMILIES["llama"], defaults={"window": None, "use_window": True})
"""What configs of such models say of windows, and of that the usual meaning."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def shape_of_module(model: nn.Module, name: str | None = None) -> ModelShape:
    """The units that the engine would find in `model`, with every parameter once, frozen ones marked.

    What a block computes is known from the model's config where it has one in terms known here, else it stays None.

    Raises:
        BadInput: the model has no parameters.
    """
    declared = _known_units(getattr(model, "config", None))
    specs = partition(model, find_units(model, None)[0])
    if not specs:
        raise BadInput(f"The model {type(model).__name__} has no parameters, so there is nothing to plan.")
    guide = _Guide(model, specs, declared)
    root = [spec for spec in specs if not spec.name]
    blocks = [spec for spec in specs if spec.name]
    tensors = tuple(guide.tensor(member, "", guide.declared_root) for spec in root for member in spec.members)
    first = UnitShape("", tensors, buffer_bytes=guide.buffer_bytes.get("", 0))
    units = (first, *merged(guide.layers(blocks)))
    return ModelShape(
        name or type(model).__name__, units, guide.vocab, guide.tied, guide.positions, family=guide.family
    )


class _Guide:
    """What a model's config and modules say of its tensors' roles."""

    def __init__(self, model: nn.Module, specs: Sequence[UnitSpec], declared: Sequence[UnitShape]) -> None:
        members = [member for spec in specs for member in spec.members]
        config = getattr(model, "config", None)
        root, *self.known = declared or [UnitShape("", ())]
        self.declared_root = {tensor.name: tensor for tensor in root.tensors}
        self.family = _family_of(config, bool(declared))
        self.config = getattr(config, "text_config", None) or config
        self.eager = getattr(self.config, "_attn_implementation", None) == "eager"
        self.vocab = _attribute(self.config, "vocab") or _largest_embedding(members)
        self.positions = _attribute(self.config, "positions") or None
        self.experts = _attribute(self.config, "experts") or _stacked(members)
        self.head = _head(members, self.vocab)
        self.tied = self.head is None and (_tied(members, self.vocab) or _says_tied(self.config))
        self.rotates = any("Rotary" in type(part).__name__ for part in model.modules())
        self.buffer_bytes = _buffer_bytes(model, {spec.name for spec in specs})
        self.products = {id(parameter) for _, parameter in divided(model).matrices}

    def layers(self, specs: Sequence[UnitSpec]) -> list[UnitShape]:
        """The blocks in order, each with what it computes."""
        known = self.known if len(self.known) == len(specs) else []
        units = []
        windows = self._windows(len(specs))
        for index, spec in enumerate(specs):
            declared = {tensor.name: tensor for tensor in known[index].tensors} if known else {}
            tensors = tuple(self.tensor(member, spec.name, declared) for member in spec.members)
            block = known[index].block if known else self._block(spec.module, tensors, windows[index])
            if block is not None and self.eager:
                block = replace(block, eager=True)
            units.append(UnitShape(spec.name, tensors, block=block, buffer_bytes=self.buffer_bytes.get(spec.name, 0)))
        return units

    def tensor(self, member: Member, unit: str, declared: Mapping[str, TensorShape] | None = None) -> TensorShape:
        """One parameter; a closed form's word on its role goes before a guess."""
        name = member.name[len(unit) + 1 :] if unit else member.name
        shape = tuple(member.parameter.shape)
        same = (declared or {}).get(name)
        if same is not None and same.shape == shape:
            return self._told(member, replace(same, trainable=member.trainable))
        role = self._role(member, shape)
        of_head = _is_head(member, self.vocab)
        split = "vocab" if of_head else _split(name, role, bool(unit))
        of_key_heads = _KEY_HEADS.search(name) is not None
        return self._told(member, TensorShape(name, shape, role, split, member.trainable, of_key_heads=of_key_heads))

    def _told(self, member: Member, tensor: TensorShape) -> TensorShape:
        """The tensor, which says whether it is a matrix of hidden layers where its role says otherwise."""
        is_matrix = id(member.parameter) in self.products
        if member.trainable:
            return replace(tensor, whole=is_matrix) if is_matrix != tensor.is_matrix else tensor
        return replace(tensor, linear=member.is_matrix) if member.is_matrix != tensor.in_linear else tensor

    def _role(self, member: Member, shape: tuple[int, ...]) -> Role:
        if len(shape) >= 2 and _embeds(member) and shape[0] == self.vocab:
            return "embedding"
        if member is self.head:
            return "head"
        if ".experts." in member.name or (len(shape) == 3 and not _convolves(member)):
            return "expert"
        if len(shape) < 2 or _embeds(member):
            return "vector"
        gates = any(part in member.name for part in ("router", "gate.", "gate_"))
        return "router" if self.experts and gates and shape[0] == self.experts else "matrix"

    def _windows(self, count: int) -> list[int | None]:
        """How many tokens each block looks back, by the config's usual names; None for all."""
        values = {key: value for key, value in values_of(self.config).items() if key in _OF_WINDOWS}
        kinds = values.get("layer_types")
        if kinds is not None and len(kinds) != count:  # of a model with other blocks besides
            del values["layer_types"]
        elif kinds is not None:  # blocks are there to be looked at, so that kinds need not be those of a family
            values["layer_types"] = ["full_attention" if kind != "sliding_attention" else kind for kind in kinds]
        if not _attribute(self.config, "window"):
            return [None] * count
        return Fields(values, _WINDOWED, type(self.config).__name__).windows(count)

    def _block(self, module: nn.Module, tensors: Sequence[TensorShape], window: int | None) -> BlockShape | None:
        """What a block of a model without a closed form computes, from its config's usual names."""
        config = self.config
        hidden, heads = _attribute(config, "hidden"), _attribute(config, "heads")
        wide = any(hidden in tensor.shape for tensor in tensors if tensor.role in ("matrix", "expert"))
        is_block = next(module.children(), None) is not None  # and no large layer, which is a unit where none repeats
        if not hidden or not heads or not wide or not is_block:
            return None
        kv_heads = _attribute(config, "kv_heads") or heads
        routed = any(tensor.role == "expert" for tensor in tensors)
        ffn = _attribute(config, "expert_ffn" if routed else "ffn") or 4 * hidden
        shared = _attribute(config, "shared_ffn") or _attribute(config, "shared_experts") * ffn
        head_dim = _attribute(config, "head_dim") or max(hidden // heads, 1)
        share = rotary_share(values_of(config), 1.0, type(config).__name__) if self.rotates else 0.0
        return BlockShape(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotated=int(head_dim * share),
            ffn=ffn,
            gated=any("gate_proj" in tensor.name or "gate_up" in tensor.name for tensor in tensors),
            experts=self.experts if routed else 0,
            active_experts=min(_attribute(config, "active") or self.experts, self.experts) if routed else 0,
            shared_ffn=shared if routed else 0,
            norm=_norm_kind(module),
            norms=round(_norm_channels(module, hidden) / hidden),
            query_key_norms=any(QUERY_KEY_NORM.search(name) for name, _ in module.named_modules()),
            result_norms=any(RESULT_NORM.search(name) for name, _ in module.named_modules()),
            window=window,
            torch_norm=any(isinstance(part, nn.RMSNorm) for part in module.modules()),
            dropout=_drops(config, RESULT_DROPOUTS),
            attention_dropout=_drops(config, ATTENTION_DROPOUTS),
            nonlinearity=_nonlinearity(module),
            masked=window is not None,
        )


def _drops(config: Any, keys: Sequence[str]) -> bool:
    values = (getattr(config, key, None) for key in keys)
    return any(isinstance(value, int | float) and value > 0 for value in values)


def _norm_kind(block: nn.Module) -> Literal["rms", "layer", "plain_layer"]:
    """What the norms of a block are: torch's layer norm, one that a model writes in plain operators, or RMS norms."""
    layers = [part for part in block.modules() if "LayerNorm" in type(part).__name__]
    if not layers:
        return "rms"
    return "layer" if any(isinstance(part, nn.LayerNorm) for part in layers) else "plain_layer"


def _nonlinearity(block: nn.Module) -> Nonlinearity:
    names = {type(part).__name__ for part in block.modules()}
    return "plain_gelu" if "NewGELUActivation" in names else "relu" if "ReLU" in names else "kernel"


def _norm_channels(block: nn.Module, hidden: int) -> int:
    """Channels that the norms of a block see, those of queries and keys apart."""
    channels = 0
    for name, part in block.named_modules():
        if "Norm" in type(part).__name__ and not QUERY_KEY_NORM.search(name):
            weight = getattr(part, "weight", None)
            channels += hidden if weight is None else weight.numel()
    return channels


def _buffer_bytes(model: nn.Module, units: Collection[str]) -> dict[str, int]:
    """Bytes of each unit's buffers, each counted once; the root's, whose name is empty, are those of no other unit."""
    by_unit: dict[str, int] = defaultdict(int)
    for name, buffer in model.named_buffers():
        holder = name.rpartition(".")[0]
        while holder and holder not in units:
            holder = holder.rpartition(".")[0]
        by_unit[holder] += buffer.nbytes
    return by_unit


def values_of(config: Any) -> dict[str, Any]:
    """What a model's config says, as a config.json has it; empty for None."""
    values: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else dict(getattr(config, "__dict__", {}))
    return values


def _family_of(config: Any, declared: bool) -> str:
    """The family that a config names, or is read as."""
    values = values_of(config)
    return family_name(values) if declared or "model_type" in values else ""


def _known_units(config: Any) -> list[UnitShape]:
    """The root and the layers that the config of a family with a closed form describes; empty for any other."""
    values = values_of(config)
    if closed_form(values) is None:
        return []
    try:
        return units_of_config(values, type(config).__name__)
    except BadInput:
        return []


def _attribute(config: Any, size: str) -> int:
    values = (getattr(config, name, None) for name in _NAMES[size])
    return next((value for value in values if type(value) is int and value > 0), 0)


def _embeds(member: Member) -> bool:
    return any(issubclass(kind, nn.Embedding) for kind in member.kinds)


def _convolves(member: Member) -> bool:
    return any(issubclass(kind, _CONVOLUTIONS) for kind in member.kinds)


def _is_head(member: Member, vocab: int) -> bool:
    """Whether it is of a linear layer with one output for each token of the vocabulary."""
    return member.shape[:1] == (vocab,) and any(issubclass(kind, nn.Linear) for kind in member.kinds)


def _head(members: Sequence[Member], vocab: int) -> Member | None:
    """The last matrix that gives one number per token of the vocabulary and embeds none."""
    heads = [member for member in members if not _embeds(member) and _is_head(member, vocab)]
    return next((member for member in reversed(heads) if member.parameter.dim() == 2), None)


def _tied(members: Sequence[Member], vocab: int) -> bool:
    return any(_embeds(member) and _is_head(member, vocab) for member in members)


def _says_tied(config: Any) -> bool:
    return any(getattr(config, name, None) is True for name in ("tie_word_embeddings", "tie_embeddings"))


def _largest_embedding(members: Sequence[Member]) -> int:
    return max((member.parameter.shape[0] for member in members if _embeds(member)), default=0)


def _stacked(members: Sequence[Member]) -> int:
    """How many experts stand in one tensor."""
    stacks = (m.parameter.shape[0] for m in members if m.parameter.dim() == 3 and not _convolves(m))
    return max(stacks, default=0)


_KEY_HEADS = re.compile(r"\b(key|value|k_proj|v_proj)\.(weight|bias)$")
"""Usual names of what makes keys or values alone."""


def _split(name: str, role: Role, in_block: bool) -> MatrixSplit:
    """How tensor parallelism usually cuts a tensor with such a name."""
    if role in ("embedding", "head"):
        return "vocab"
    *_, module, leaf = ("", *name.split("."))
    back = module in _ROWS or leaf in _ROWS
    if not in_block or role == "router" or "norm" in module or (back and role == "vector"):
        return "none"
    return "row" if back else "column"
