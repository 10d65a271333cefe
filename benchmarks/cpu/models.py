"""The models that are trained: a plain decoder, one with experts, one mostly frozen, and one of many small tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """The size of a model. `experts` 0 means a dense MLP; `rank` 0 means that every weight is trained."""

    blocks: int
    width: int
    vocabulary: int
    sequence: int
    experts: int = 0
    rank: int = 0
    checkpointing: bool = False


class Experts(nn.Module):
    """Two-layer MLPs as stacked 3-D weights; each token goes to the expert with the highest score."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(shape.experts, shape.width, 2 * shape.width) / shape.width**0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, 2 * shape.width, shape.width) / shape.width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to the same shape."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for expert in range(self.up.shape[0]):
            of_expert = (chosen == expert).nonzero().squeeze(1)
            hidden = F.gelu(tokens[of_expert] @ self.up[expert]) @ self.down[expert]
            mixed = mixed.index_add(0, of_expert, hidden * weight[of_expert, None])
        return mixed.view_as(x)


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        adapted: Tensor = self.frozen(x) + self.b(self.a(x))
        return adapted


class Block(nn.Module):
    """Pre-norm causal attention and an MLP, four-fold or of experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        linear: Callable[[int, int], nn.Module] = nn.Linear
        if shape.rank:
            linear = lambda inputs, outputs: Adapted(inputs, outputs, shape.rank)  # noqa: E731
        self.heads = width // HEAD_WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        if shape.experts:
            self.mlp: nn.Module = Experts(shape)
        else:
            self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))
        if shape.rank:
            for norm in (self.norm1, self.norm2):
                norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to the same shape."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    """Embedding, blocks, final norm, untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.checkpointing = shape.checkpointing
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.rank:
            for module in (self.embedding, self.positions, self.norm, self.head):
                module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Attention(nn.Module):
    """Causal attention with a matrix for each of queries, keys, values and outputs: how many heads follows from them.

    Attributes:
        attend: attention of queries, keys and values [batch, heads, tokens, HEAD_WIDTH]; others may put theirs here.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape."""
        heads = [each(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        result: Tensor = self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        return result


class DivisibleBlock(nn.Module):
    """Pre-norm causal attention and a four-fold MLP, of which several ranks can have parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Divisible(nn.Module):
    """A decoder without positions, whose matrices and sequences several ranks can share."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DivisibleBlock(shape.width) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.context: Any = None

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """int64 [batch, tokens] to logits [batch, tokens, vocabulary]; positions where sequences are shared."""
        if self.context is not None:
            mask = self.context.mask(positions, tokens.shape[1])
            for attention in self.attentions():
                attention.attend = partial(self.context.attend, mask=mask)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def attentions(self) -> list[Attention]:
        """Of all blocks."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def use_context(self, context: Any) -> None:
        """Share sequences with other ranks (`tz.parallelize`)."""
        self.context = context


class Stack(nn.Module):
    """A unit of small linear layers of width 64, each behind a residual connection."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., 64] to the same shape."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


class ManySmall(nn.Module):
    """A thousand small tensors: 20 units of 25 layers, each with a weight and a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, 64)
        self.blocks = nn.ModuleList(Stack(25) for _ in range(shape.blocks))
        self.head = nn.Linear(64, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def mixtral(shape: Shape) -> nn.Module:
    """Of top-2 experts, each twice as wide as the model, from torch's default generator."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=2 * shape.width,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.width // HEAD_WIDTH,
        num_key_value_heads=shape.width // HEAD_WIDTH,
        num_local_experts=shape.experts,
        num_experts_per_tok=2,
        max_position_embeddings=shape.sequence,
        use_cache=False,
        dtype=torch.float32,
    )
    model: nn.Module = MixtralForCausalLM(config)
    return model


UNITS = (Block, DivisibleBlock, Stack)
"""The module classes whose instances are gathered and reduced as one."""
