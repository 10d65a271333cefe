"""NF4 as plain PyTorch has it, on whole tensors: the oracle of frozen weights that are kept so."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = torch.tensor(
    (-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1)
)  # fmt: skip


def rounded(values: Tensor, form: str) -> Tensor:
    """What comes back of `values`, of any shape, kept in blocks of 64 from the first element: fp32 that bf16 holds."""
    group = 64 if form == "nf4" else 64 * 256
    blocks = torch.nn.functional.pad(values.float().flatten(), (0, -values.numel() % group)).view(-1, 64)
    largest = blocks.abs().max(dim=1).values
    scale = largest.bfloat16().float() if form == "nf4" else by_octaves(largest.view(-1, 256)).flatten()
    ratio = blocks / torch.where(scale == 0, 1.0, largest if form == "nf4" else scale)[:, None]
    nearest = (ratio.double()[:, :, None] - LEVELS.double()).abs().argmin(dim=-1)
    kept = (LEVELS[nearest] * scale[:, None]).bfloat16().float()
    return kept.flatten()[: values.numel()].view(values.shape)


def by_octaves(largest: Tensor) -> Tensor:
    """Scales of groups of 256 blocks: sixteen to each factor of two below the largest of the group, 255 of them."""
    highest = largest.max(dim=1, keepdim=True).values.bfloat16().double()
    steps = torch.round(torch.log2(largest.double() / highest) * 16).clamp(-254, 0)
    return torch.where(largest > 0, highest * torch.exp2(steps / 16), 0.0).bfloat16().float()
