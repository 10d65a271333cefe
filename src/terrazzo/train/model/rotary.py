"""Rotary positions of the built-in decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RotaryTable", "rotate"]


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary positions (RoFormer, arXiv 2104.09864).

    Both are fp32 `[length, head_dim / 2]`. The buffers are recomputed, never saved: `state_dict` does not
    hold them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        shape = (length, head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        length, pairs = self.cos.shape
        # fp64 angles: at position 100,000 an fp32 product is already off by 0.01 radians.
        frequency = self.theta ** (-torch.arange(pairs, dtype=torch.float64, device=self.cos.device) / pairs)
        position = torch.arange(length, dtype=torch.float64, device=self.cos.device)
        angle = torch.outer(position, frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """The tables of the first `length` positions, each `[length, head_dim / 2]`."""
        return self.cos[:length], self.sin[:length]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions`, int64 `[B, T]`, for all heads: each `[B, 1, T, head_dim / 2]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (i, i + head_dim / 2) of `x` `[B, H, T, head_dim]` by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
