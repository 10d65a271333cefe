"""A small decoder-only language model to train and to read.

Pre-norm blocks of causal grouped-query attention with rotary positions and a SwiGLU feed-forward, no biases:
the architecture of Llama (arXiv 2302.13971) with the grouped queries of arXiv 2305.13245. `Block` is the
sharding unit.

Every module that owns parameters or buffers has `reset_parameters()` and nothing is computed outside of it,
so a model built under `torch.device("meta")` can be materialised (`to_empty`) and initialised one module at a
time, in `modules()` order, with exactly the values that ordinary construction from the same seed gives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo import parallel
from terrazzo.config import head_faults
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel import AttentionMask, Context, Style
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.expert_load import part_of_padding
from terrazzo.train.model.experts import MixtureConfig, MixtureOfExperts
from terrazzo.train.model.rotary import RotaryTable, rotate

__all__ = ["Block", "Decoder", "DecoderConfig"]

INIT_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a `Decoder`. `ffn_dim` is the width of each of the two SwiGLU branches.

    Without `attention` a token sees all tokens before it.

    Raises:
        BadInput: a size that is not positive, `heads` that does not divide `dim` or is not a multiple of `kv_heads`,
            an odd head size (rotary positions turn pairs), or a dropout outside [0, 1).
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    max_sequence_length: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dropout: float = 0.0
    experts: MixtureConfig | None = None
    attention: AttentionPattern | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("tie_embeddings", "dropout", "experts", "attention") and not value > 0:
                raise BadInput(f"model.{field.name} is {value}; it must be greater than 0.")
        if not 0.0 <= self.dropout < 1.0:
            raise BadInput(f"model.dropout is {self.dropout}; give a probability from 0 up to, not including, 1.")
        for key, why in head_faults(self.dim, self.heads, self.kv_heads):
            raise BadInput(f"model.{key} {why}.")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.heads

    def to_dict(self) -> dict[str, Any]:
        """What a config.json of it would hold, in the terms that the planner reads: without anything nested."""
        values = {"model_type": "terrazzo", **asdict(self)}
        attention, experts = values.pop("attention"), values.pop("experts")
        if attention is not None:
            usual = {"sliding_window": attention["window"], "sliding_window_pattern": attention["full_every"]}
            values |= usual | {"stride": attention["stride"], "prefix": attention["prefix"]}
        if experts is not None:
            usual = {"num_experts": experts.pop("count"), "num_experts_per_tok": experts.pop("top_k")}
            usual |= {"moe_intermediate_size": experts.pop("ffn_dim"), "n_shared_experts": experts.pop("shared")}
            values |= usual | {f"router_{name}": value for name, value in experts.items()}
        return values

    @property
    def has_prefix(self) -> bool:
        """Whether tokens of a prompt see each other in both directions."""
        return self.attention is not None and self.attention.prefix

    @property
    def seen(self) -> list[Kind]:
        """Window and stride of each layer; None where it has none."""
        pattern = self.attention
        return [(None, None) if pattern is None else pattern.seen(layer) for layer in range(self.layers)]

    @property
    def matmul_numel(self) -> int:
        """Elements of the matrices that multiply one token: the output head, but not a mere look-up.

        Of experts those that are chosen, and the router.
        """
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        feed_forward = 3 * self.dim * self.ffn_dim
        if (experts := self.experts) is not None:
            chosen = experts.top_k + experts.shared
            feed_forward = 3 * self.dim * experts.ffn_dim * chosen + self.dim * experts.count
        return self.layers * (attention + feed_forward) + self.vocab_size * self.dim


class Linear(nn.Linear):
    """A linear map without bias that knows its initial standard deviation, to be initialised alone."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # before super(): nn.Linear initialises itself at once
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """Token embeddings with the model's initial standard deviation."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


Kind = tuple[int | None, int | None]
"""Window and stride of a layer's attention; None where it has none."""
Seen = Tensor | AttentionMask | None
"""What tokens see: where a mask `[B, 1, T, T]` is True, what tiles say, or all before them and themselves."""


def document_mask(positions: Tensor) -> Tensor:
    """What a token sees: the tokens before it since its document began, where `positions` `[B, T]` are 0.

    Bool `[B, 1, T, T]`.
    """
    document = (positions == 0).cumsum(dim=-1)
    return (document.unsqueeze(-1) == document.unsqueeze(-2)).tril().unsqueeze(1)


class Attention(nn.Module):
    """Causal self-attention in which `heads / kv_heads` query heads share one key-value head.

    A context computes it tile by tile. Of several ranks, their tokens see those that others have of the same sequences.
    """

    context: Context | None = None
    layer = 0

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.grouped = config.head_dim, config.heads != config.kv_heads
        kv_dim = config.kv_heads * config.head_dim
        self.query = Linear(config.dim, config.dim)
        self.key = Linear(config.dim, kv_dim)
        self.value = Linear(config.dim, kv_dim)
        self.output = Linear(config.dim, config.dim, std=INIT_STD / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen = None) -> Tensor:
        query = rotate(self.split_heads(self.query(x)), cos, sin)
        key = rotate(self.split_heads(self.key(x)), cos, sin)
        value = self.split_heads(self.value(x))
        if isinstance(seen, AttentionMask):
            assert self.context is not None
            mixed = self.context.attend(query, key, value, seen, layer=self.layer)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=self.grouped
            )
        merged: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return merged

    def split_heads(self, x: Tensor) -> Tensor:
        """`[B, T, heads × head_dim]` to `[B, heads, T, head_dim]`."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) × up(x))` (arXiv 2002.05202).

    Args:
        width: of the two branches; by default the configuration's.
    """

    def __init__(self, config: DecoderConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.ffn_dim if width is None else width
        self.gate = Linear(config.dim, width)
        self.up = Linear(config.dim, width)
        self.down = Linear(width, config.dim, std=INIT_STD / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return hidden


def _feed_forward(config: DecoderConfig) -> nn.Module:
    """The feed-forward of one block: the same for all tokens, or a mixture of experts."""
    experts = config.experts
    if experts is None:
        return FeedForward(config)
    shared = FeedForward(config, experts.shared * experts.ffn_dim) if experts.shared else None
    return MixtureOfExperts(config.dim, experts, shared, INIT_STD, INIT_STD / (2 * config.layers) ** 0.5)


class Block(nn.Module):
    """One block, the sharding unit: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, seen))
        of_experts = [] if padding_mask is None else [padding_mask]
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x), *of_experts))
        return out


def _feed_forward_plan(experts: MixtureConfig | None) -> dict[str, Style]:
    """How ranks share the feed-forwards' matrices. Those of experts are whole: each rank computes its own tokens."""
    prefix = "blocks.*.feed_forward"
    if experts is not None:
        whole = ["router", "experts", *(f"shared.{matrix}" for matrix in ("gate", "up", "down") if experts.shared)]
        return {f"{prefix}.{each}": parallel.Replicate() for each in whole}
    plan: dict[str, Style] = {prefix: parallel.Enter()}
    return plan | {
        f"{prefix}.gate": parallel.Colwise(),
        f"{prefix}.up": parallel.Colwise(),
        f"{prefix}.down": parallel.Rowwise(),
    }


class TiedHead(nn.Module):
    """Multiplies with the embedding matrix, which it does not own, where there is no other head."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Decoder(nn.Module):
    """A decoder-only language model.

    With `tie_embeddings` there is no separate head: the embedding matrix is multiplied a second time. One
    parameter under one name stays one parameter through `to_empty`, which breaks ties between two names.
    """

    context: Context | None = None
    _no_split_modules = ("Block",)  # units, as in models of transformers; of a single one no repetition tells

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.dim)
        self.rotary = RotaryTable(config.max_sequence_length, config.head_dim, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)
        self.tied_head = TiedHead()
        if config.attention is not None:
            self._compute_by(Context(None))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Next-token logits `[B, T, vocab_size]` of int64 `input_ids` `[B, T]`, T ≤ `max_sequence_length`.

        With `position_ids`, int64 `[B, T]`, each 0 begins a document, which sees nothing of those before it. A model
        that shares its sequences (`use_context`) takes and gives this rank's part of them, and always needs these. One
        with a prefix mask needs `prefix_lengths`, int64 `[B, T]`: of each token, how many its document's prompt has.
        `padding_mask`, bool `[B, T]`, is True where there is no token: routers of experts do not count there.

        Raises:
            Misuse: a prefix mask without lengths, or lengths without one.
        """
        x = self.hidden(input_ids, position_ids, prefix_lengths, padding_mask)
        logits: Tensor = self.tied_head(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits

    def hidden(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """What the head is given, `[B, T, dim]`."""
        length = tokens.shape[1] * (self.context.size if self.context is not None and self.context.is_split else 1)
        if length > self.config.max_sequence_length:
            raise BadInput(
                f"The model was given sequences of {length} tokens, but batch.sequence_length, for which it "
                f"was built, is {self.config.max_sequence_length}. Raise it, or shorten the sequences."
            )
        self._check_prefix(prefix_lengths)
        kinds = self.config.seen
        given = (position_ids, prefix_lengths, tokens.shape[1])
        seen = {kind: self._seen(*given, kind) for kind in dict.fromkeys(kinds)}
        cos, sin = self.rotary(tokens.shape[1]) if position_ids is None else self.rotary.at(position_ids)
        x = self.embedding(tokens)
        padding_mask = None if self.config.experts is None else part_of_padding(self, padding_mask)
        for block, kind in zip(self.blocks, kinds, strict=True):
            x = block(x, cos, sin, seen[kind], padding_mask)
        hidden: Tensor = self.norm(x)
        return hidden

    def _check_prefix(self, prefix_lengths: Tensor | None) -> None:
        if self.config.has_prefix == (prefix_lengths is not None):
            return
        if self.config.has_prefix:
            raise Misuse(
                "The model has a prefix mask (attention.prefix), and was called without prefix_lengths: give of each"
                " token how many tokens its document's prompt has, int64 of the tokens' shape, 0 for none."
            )
        raise Misuse(
            "The model was given prefix_lengths, and its attention is causal: leave them out, or build it with"
            " attention=AttentionPattern(prefix=True)."
        )

    def _seen(self, position_ids: Tensor | None, prefix_lengths: Tensor | None, tokens: int, kind: Kind) -> Seen:
        """What the tokens of one kind of layers see."""
        context, (window, stride) = self.context, kind
        if context is None:
            return None if position_ids is None else document_mask(position_ids)
        if context.size == 1 and position_ids is None and window is None and prefix_lengths is None:
            return None
        return context.mask(position_ids, tokens, window, stride, prefix_lengths)

    def use_context(self, context: Context) -> None:
        """Be given parts of sequences from now on, whose rest other ranks have. `position_ids` say which.

        Raises:
            BadInput: heads that the context cannot divide, or a window that it does not compute.
        """
        context.check_heads(self.config.heads)
        if self.config.attention is not None:
            context.check_window(self.config.attention.window)
        self._compute_by(context)

    def _compute_by(self, context: Context) -> None:
        self.context = context
        attentions = (module for module in self.modules() if isinstance(module, Attention))
        for layer, module in enumerate(attentions):
            module.context, module.layer = context, layer

    def pipeline_line(self) -> list[str]:
        """The modules through which values go one after the other: see `tz.Pipeline`."""
        return ["embedding", "blocks.*", "norm", *(() if self.head is None else ("head",))]

    def pipeline_tied(self) -> list[str]:
        """The parameters that are read behind these: see `tz.Pipeline`."""
        return ["embedding.weight"] if self.head is None else []

    def tensor_plan(self, gathered: bool = True) -> dict[str, Style]:
        """How ranks share its matrices: see `tz.parallelize`.

        Args:
            gathered: every rank is given all logits; else its part of them, for a `VocabularyLoss`.
        """
        heads, kv_heads = self.config.heads, self.config.kv_heads
        plan: dict[str, Style] = {"embedding": parallel.Embedding(), "blocks.*": parallel.SplitSequence()}
        plan["blocks.*.attention"] = parallel.Enter()
        plan["blocks.*.attention.query"] = parallel.Colwise(heads)
        for matrix in ("key", "value"):
            plan[f"blocks.*.attention.{matrix}"] = parallel.Colwise(kv_heads)
        plan["blocks.*.attention.output"] = parallel.Rowwise()
        plan |= _feed_forward_plan(self.config.experts)
        if self.head is None:
            return plan | {"tied_head": parallel.Logits(self.config.vocab_size, gathered)}
        return plan | {"head": parallel.Colwise(gathered=gathered)}

    def num_flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of forward and backward for one token: `6 N + 12 × layers × dim × T`.

        PaLM (arXiv 2204.02311), appendix B: two per multiply-accumulate, once forward and twice backward, for
        N matrix elements, and the same for the two `[T, T]` products of each layer. As there, causal masking
        is not subtracted, recomputation does not count, and the input look-up is not a matrix product. A layer with a
        window counts by the tokens that one sees there in place of T.
        """
        pattern, layers = self.config.attention, range(self.config.layers)
        attended = [pattern.attended(layer, sequence_length) if pattern else sequence_length for layer in layers]
        attention = 12 * self.config.dim * sum(attended)
        return 6 * self.config.matmul_numel + attention
