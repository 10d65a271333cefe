"""What is trained: one plain decoder, in sizes that make either traffic or arithmetic the bottleneck."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """A model size and a batch; each rank computes `batch * sequence` tokens per step."""

    blocks: int
    width: int
    vocabulary: int
    batch: int
    sequence: int
    about: str

    def describe(self) -> str:
        """One line for a report."""
        numel = sum(p.numel() for p in self.model("meta").parameters())
        tokens = self.batch * self.sequence
        return f"{numel / 1e6:.1f} M parameters, {self.blocks} blocks, {tokens} tokens per rank: {self.about}"

    def model(self, device: str = "cpu") -> Decoder:
        """A fresh model from torch's default generator."""
        with torch.device(device):
            return Decoder(self)

    def tokens(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, sequence] each, the same for every contender."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        drawn = torch.randint(self.vocabulary, (self.batch, self.sequence + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


CASES = {
    "traffic": Case(14, 768, 1024, 1, 64, "moving parameters takes longer than using them"),
    "compute": Case(6, 256, 512, 8, 256, "arithmetic takes nearly all of the time"),
    "tiny": Case(3, 64, 128, 2, 32, "for trying the benchmark itself"),
}


class Block(nn.Module):
    """Pre-norm causal attention and a four-fold MLP, heads of 64 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to the same shape."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    """Embedding, blocks, final norm, untied head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.positions = nn.Embedding(case.sequence, case.width)
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(case.blocks))
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
