"""What the planner knows of a model: its tensors, grouped into sharding units, and what a block does with a token.

Shapes only: no weights, no device, no framework. Everything else in this package is arithmetic on these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from terrazzo.planner.caching import hashed_once

__all__ = [
    "BUILT_IN",
    "BlockShape",
    "MatrixSplit",
    "ModelShape",
    "Nonlinearity",
    "Role",
    "TensorShape",
    "UnitShape",
    "active_share",
    "line_matrices",
    "parts_along_tp",
]

BUILT_IN = "terrazzo"
"""The family of the built-in decoder."""

Role = Literal["matrix", "vector", "embedding", "head", "expert", "router"]
"""What a tensor does: `matrix` multiplies every token; `embedding` is looked up (a tied one is also the `head`, see
`ModelShape.tied`); `head` gives the logits; `expert` holds all routed experts of a layer, of which a token meets
`active_experts / experts`; `router` chooses among them; `vector` is a norm or bias."""

Nonlinearity = Literal["kernel", "relu", "plain_gelu", "clamped"]

MatrixSplit = Literal["column", "column_gathered", "row", "row_splits", "vocab", "none"]
"""How tensor parallelism cuts it. Vectors of split outputs are `column`; norms are `none`. Outputs of `column_gathered`
are put together, and each rank takes its part of what goes into `row_splits`; see `terrazzo.parallel.tensor.styles`."""


@dataclass(frozen=True)
class TensorShape:
    """One parameter.

    Attributes:
        name: relative to its unit.
        copies: how many ranks of a pipeline have it.
        whole: whether an optimizer of whole matrices has it; None: as its role says.
        linear: whether it is the weight of a linear layer; None: as its role says.
        of_key_heads: whether it makes keys or values alone: of fewer key heads than tensor-parallel ranks all have all.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "matrix"
    split: MatrixSplit = "none"
    trainable: bool = True
    copies: int = 1
    whole: bool | None = None
    linear: bool | None = None
    of_key_heads: bool = False

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether an optimizer of whole matrices has it, or each matrix of it; see `terrazzo.optim.hidden_matrices`."""
        if self.whole is not None:
            return self.whole
        inside = self.role in ("matrix", "router", "expert") and not self.name.endswith("bias")
        return inside and (len(self.shape) == 2 or (len(self.shape) == 3 and self.role == "expert"))

    @property
    def in_linear(self) -> bool:
        """Whether it is the weight of a linear layer, of those that multiply every token."""
        return self.role == "matrix" and self.name.endswith("weight") if self.linear is None else self.linear

    @property
    def is_table(self) -> bool:
        """Whether it is looked up: an embedding, or learned positions, which are vectors in a table."""
        return self.role == "embedding" or (self.role == "vector" and len(self.shape) == 2)


@dataclass(frozen=True)
class BlockShape:
    """What one transformer block computes, as far as activations and FLOPs depend on it.

    Attributes:
        hidden: width of the residual stream.
        heads, kv_heads: query heads, and key-value heads that they share.
        head_dim: channels of a query or key head; `value_dim` of a value head.
        rotated: of `head_dim`, those that a rotary embedding turns; 0 without one.
        fused_qkv: queries, keys and values come from one matrix.
        heads_first: what is rotated lies in the order of heads.
        parallel: attention and MLP have the same input, as in GPT-J (arXiv 2204.02311, section 2).
        ffn: inner width of the dense MLP, or of one routed expert. `gated`: SwiGLU and its like, three matrices.
        experts, active_experts: routed experts, and how many a token meets; 0 for a dense MLP.
        shared_ffn: inner width of the experts that every token meets. `shared_gate`: what they give is weighted too.
        fp32_router: the router's product is in fp32.
        norm: `rms`, `layer`, or `plain_layer` where that is plain operators in fp32, as Cohere's. `norms` counts
            those of the residual stream's width. `query_key_norms`: queries and keys are normed too, in heads or whole.
            `result_norms`: what attention and MLP give is normed, as Gemma-2's and OLMo-2's.
        dropout: whether a part of what attention and MLP give is dropped, whose masks are kept; `attention_dropout`:
            of the softmax of scores.
        window: tokens that attention looks back, None for all. `stride`: beyond it each at a multiple of that distance.
        prefix: tokens of a prompt see each other in both directions.
        latent: channels of the compressed keys and values and of the compressed queries (MLA), 0 without; `kv_latent`
            of the keys and values alone.
        torch_norm: norms are torch's own modules, one kernel on CUDA, instead of explicit fp32 arithmetic.
        wide_norm: RMS norms multiply by their weights in fp32 too, as Gemma's; layer norms compute in fp32, as OLMo's.
        nonlinearity: of the MLP: one kernel that keeps its input and output, `relu`, which keeps its output alone,
            `plain_gelu`, a tanh GELU in plain operators as GPT-2's in transformers (`gelu_new`), or `clamped`, as of
            gpt-oss's experts.
        soft_cap: scores are kept within a cap by tanh, as Gemma-2's: torch's fused kernels have none.
        eager: attention is plain operators, whatever kernels there are, as transformers has it with soft caps, sinks
            and ALiBi. `sinks`: its softmax is over the scores and a learned one, in their own dtype. `clamped`: scores
            are kept above the least number of their dtype, and their softmax is in it too, as XGLM's.
        one_key: torch's attention is given one key head for all query heads, which no fused kernel takes (Falcon);
            it is copied from what gives all three.
        masked: torch's attention is given a mask, [sequence, sequence], where a window is no longer than the sequence,
            or always where there is no window (Falcon).
        whole_attention, whole_mlp: tensor-parallel ranks put the outputs of its first matrices together, and compute
            alike up to its last.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    rotated: int = 0
    fused_qkv: bool = False
    heads_first: bool = False
    parallel: bool = False
    value_dim: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    fp32_router: bool = False
    norm: Literal["rms", "layer", "plain_layer"] = "rms"
    norms: int = 2
    query_key_norms: bool = False
    result_norms: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    window: int | None = None
    stride: int | None = None
    prefix: bool = False
    latent: int = 0
    kv_latent: int = 0
    torch_norm: bool = False
    nonlinearity: Nonlinearity = "kernel"
    soft_cap: bool = False
    eager: bool = False
    sinks: bool = False
    clamped: bool = False
    one_key: bool = False
    masked: bool = False
    wide_norm: bool = False
    whole_attention: bool = False
    whole_mlp: bool = False

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    def attention_parts(self, tp: int) -> int:
        """Tensor-parallel ranks that have a part each of what attention computes."""
        return 1 if self.whole_attention else tp

    def key_heads(self, tp: int) -> float:
        """Key-value heads that a tensor-parallel rank computes: of fewer of them than ranks each one."""
        return max(1.0, self.kv_heads / self.attention_parts(tp))

    def query_key_channels(self, tp: int) -> float:
        """Channels of the queries and keys that a tensor-parallel rank computes."""
        return (self.heads / self.attention_parts(tp) + self.key_heads(tp)) * self.head_dim

    @property
    def latent_norm_channels(self) -> int:
        """Channels of compressed queries, keys and values that are normed (MLA): all but the rotated key."""
        return self.latent - self.rotated if self.latent else 0

    def mlp_parts(self, tp: int) -> int:
        """Tensor-parallel ranks that have a part each of what the MLP computes."""
        return 1 if self.whole_mlp else tp

    def is_masked(self, sequence: int) -> bool:
        """Whether torch's attention is given a mask for sequences of that length."""
        return self.masked and (self.window is None or self.window <= sequence)

    def attended(self, sequence: int) -> int:
        """Tokens that one looks back on in sequences of that length, itself included, where there are so many."""
        near = min(sequence, self.window or sequence)
        return near + ((sequence - near) // self.stride if self.stride else 0)


@hashed_once
@dataclass(frozen=True)
class UnitShape:
    """`count` equal units in a row. The root unit, whose name is empty, holds what belongs to no other.

    `block` is what it computes; None of the root, and of units of which that is not known.
    `buffer_bytes`: of the buffers of one of them, as far as these are known; of the root those that belong to no other
    unit. `forward_only`: nothing is trained in it or in front of it, so that no gradient goes back through it.
    """

    name: str
    tensors: tuple[TensorShape, ...]
    count: int = 1
    block: BlockShape | None = None
    buffer_bytes: int = 0
    forward_only: bool = False

    @property
    def is_root(self) -> bool:
        """Whether it encloses the others: its weights stay from forward to backward."""
        return not self.name

    @cached_property
    def numel(self) -> int:
        """Elements of one of them."""
        return sum(tensor.numel for tensor in self.tensors)


class CountedTensor(NamedTuple):
    """A tensor that a model has `number` times, and what the block around it computes."""

    number: int
    tensor: TensorShape
    block: BlockShape | None


@dataclass(frozen=True)
class ModelShape:
    """A model. `units[0]` is the root; the others follow in the order in which they run.

    Attributes:
        vocab: size of the vocabulary; 0 for a bare number of parameters, of which only states can be said.
        tied: the head is the embedding matrix, which then is one tensor of role `embedding`.
        outputs: of the head for each token, where these are not the vocabulary's logits.
        capped: logits are kept within a cap by tanh.
        family: `model_type` of its config; empty where it has none.
        positions: longest sequence, None where nothing limits it.
        bare: a number of parameters alone: nothing is padded, and nothing but states can be said.
    """

    name: str
    units: tuple[UnitShape, ...]
    vocab: int = 0
    tied: bool = False
    positions: int | None = None
    bare: bool = False
    outputs: int | None = None
    family: str = ""
    capped: bool = False

    @property
    def logits(self) -> int:
        """Outputs of the head for each token."""
        return self.vocab if self.outputs is None else self.outputs

    @property
    def root(self) -> UnitShape:
        return self.units[0]

    @property
    def repeated(self) -> tuple[UnitShape, ...]:
        """The units beside the root."""
        return self.units[1:]

    @cached_property
    def blocks(self) -> tuple[BlockShape, ...]:
        """What the units beside the root compute, of each kind of them; nothing of those of which it is not known."""
        return tuple(unit.block for unit in self.repeated if unit.block is not None)

    @cached_property
    def computes(self) -> bool:
        """Whether it is known what every block computes, and so what a step takes beside states."""
        return bool(self.repeated) and all(unit.block for unit in self.repeated)

    @cached_property
    def soft_caps(self) -> bool:
        """Whether attention caps its scores, in any block."""
        return any(block.soft_cap for block in self.blocks)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a block, at most; 0 of a model without."""
        return max((block.experts for block in self.blocks), default=0)

    @cached_property
    def layers(self) -> int:
        return sum(unit.count for unit in self.repeated)

    @cached_property
    def line_length(self) -> int:
        """Parts that values go through one after the other: embeddings, layers, last norm, and a head of its own."""
        return self.layers + 2 + len(line_matrices(self.root))

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream; 0 for a bare number of parameters."""
        return next((block.hidden for block in self.blocks), 0)

    @cached_property
    def numel(self) -> int:
        """All parameters, each once."""
        return sum(unit.count * unit.numel for unit in self.units)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(count * tensor.numel for count, tensor, _ in self.tensors() if tensor.trainable)

    @cached_property
    def active_numel(self) -> int:
        """Parameters that one token meets: routed experts count by their active share."""
        return sum(round(count * tensor.numel * active_share(tensor, block)) for count, tensor, block in self.tensors())

    @cached_property
    def matmul_numel(self) -> int:
        """Elements of all matrices that a token is multiplied with: the head, but not a mere look-up."""
        return self._matmul_numel(frozen=False)

    @cached_property
    def forward_only_numel(self) -> int:
        """Elements of `matmul_numel` in blocks that no gradient goes back through."""
        silent = replace(self, units=(replace(self.root, tensors=()), *(u for u in self.repeated if u.forward_only)))
        return silent.matmul_numel

    @cached_property
    def frozen_matmul_numel(self) -> int:
        """Elements of `matmul_numel` that have no gradient."""
        return self._matmul_numel(frozen=True)

    def _matmul_numel(self, frozen: bool) -> int:
        total = 0
        for count, tensor, block in self.tensors():
            if (
                tensor.role in ("matrix", "head", "expert", "router") or (tensor.role == "embedding" and self.tied)
            ) and not (frozen and tensor.trainable):
                total += round(count * tensor.numel * active_share(tensor, block))
        return total

    @cached_property
    def trains_head(self) -> bool:
        """Whether the matrix that gives the logits has a gradient."""
        role = "embedding" if self.tied else "head"
        return any(tensor.trainable for tensor in self.root.tensors if tensor.role == role)

    def tensors(self) -> Iterator[CountedTensor]:
        """Every tensor with how often it occurs and the block it belongs to."""
        for unit in self.units:
            for tensor in unit.tensors:
                yield CountedTensor(unit.count, tensor, unit.block)


def line_matrices(root: UnitShape) -> list[TensorShape]:
    """Matrices behind the blocks, each of which may be in a stage by itself: a head that is not tied."""
    return [each for each in root.tensors if not each.is_table and len(each.shape) > 1]


def parts_along_tp(tensor: TensorShape, block: BlockShape | None, tp: int, whole_experts: bool) -> int:
    """How many parts of a tensor `tp` ranks have, one each: `tp`, or 1 where each has it whole.

    Where there are fewer key heads than ranks, all ranks have all of them; so they have whole experts.
    """
    few_heads = block is not None and tensor.of_key_heads and block.kv_heads < tp
    is_whole = tensor.split == "none" or few_heads or (tensor.role == "expert" and whole_experts)
    return 1 if is_whole else tp


def active_share(tensor: TensorShape, block: BlockShape | None) -> float:
    """The share of a tensor that one token meets."""
    if tensor.role != "expert" or block is None or not block.experts:
        return 1.0
    return block.active_experts / block.experts
