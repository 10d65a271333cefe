"""Blocks of 8 or 4 bits as plain PyTorch has them, on whole tensors: the oracle of what is kept or sent so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SQUARES = ("exp_avg_sq", "max_exp_avg_sq")


def rounded(values: Tensor, form: str, squares: bool) -> Tensor:
    """What comes back of `values`, fp32 of any shape, that have been kept in blocks of 256 from its first element."""
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % 256)).view(-1, 256)
    if squares:
        blocks = torch.sqrt(blocks)
    scale = blocks.abs().max(dim=1, keepdim=True).values
    ratio = torch.where(scale > 0, blocks / scale, torch.zeros(()))
    bits = scale.view(torch.int32).to(torch.int64)
    places = (torch.arange(256) * 159 + (bits * 2654435761) % 2**32 // 2**24) % 256
    threshold = (2 * places + 1).float() / 512
    size = by_exponent(ratio, threshold, squares) if form == "int8" else by_float(ratio, threshold, squares)
    kept = size * scale
    return (kept * kept if squares else kept).flatten()[: values.numel()].view(values.shape)


def by_exponent(ratio: Tensor, threshold: Tensor, squares: bool) -> Tensor:
    """Signs, and powers of two with 14 or 7 to the octave, below 1; 254 of them, or 126."""
    each, least = (14, -254) if squares else (7, -126)
    last = 255 if squares else 127
    exponent = torch.floor(torch.log2(ratio.abs()) * each + last + threshold) - last
    size = torch.exp2(exponent.double() / each).float()
    if squares:
        return torch.where(ratio > 0, torch.where(exponent < least, 2.0 ** (least / each), size), torch.zeros(()))
    return torch.where(exponent < least, torch.zeros(()), size * torch.sign(ratio))


def by_float(ratio: Tensor, threshold: Tensor, squares: bool) -> Tensor:
    """Multiples of an eighth of the power of two below, up to 448, and of 2 ** -9 where that is more."""
    size = ratio.abs().double() * 448
    unit = torch.exp2((torch.frexp(size).exponent.double() - 4).clamp(min=-9))
    size = torch.where(size > 0, torch.floor(size / unit + threshold) * unit, 0.0)
    if squares:
        size = torch.where((ratio > 0) & (size < 2.0**-9), 2.0**-9, size)
    return ((size / 448) * torch.sign(ratio)).float()


def as_sent(values: Tensor, form: str) -> Tensor:
    """What ranks see of a matrix that is sent in blocks of 256 from its first element; others are sent as they are."""
    if not form or not in_blocks(values):
        return values
    blocks = torch.nn.functional.pad(values.float().flatten(), (0, -values.numel() % 256)).view(-1, 256)
    mantissa, exponent = torch.frexp((blocks.abs().max(dim=1, keepdim=True).values / SENT[form]).double())
    scale = torch.ldexp(torch.floor(mantissa * 2**16 + 0.5) / 2**16, exponent).float()
    ratio = torch.where(scale > 0, blocks / scale, torch.zeros(())).double()
    if form in ("int8", "int4"):
        kept = torch.round(ratio).clamp(-SENT[form], SENT[form]) + 0.0  # whole numbers have no -0
    else:
        unit = torch.exp2((torch.frexp(ratio).exponent - 4).clamp(min=-9).double())
        kept = (torch.round(ratio / unit) * unit).clamp(-448, 448)
    return (kept * scale).to(values.dtype).flatten()[: values.numel()].view(values.shape)


def in_blocks(values: Tensor) -> bool:
    """Whether it is sent so where that is asked for."""
    return values.ndim >= 2 and values.numel() >= 256


SENT = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
"""The largest code."""


def keep_rounded(optimizer: Optimizer, form: str) -> Optimizer:
    """Have a plain optimizer keep in `form` what it keeps for each element, from one step to the next."""

    def after(optimizer: Optimizer, *_: Any) -> None:
        for parameter, kept in optimizer.state.items():
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                    kept[key] = rounded(value, form, key in SQUARES)

    optimizer.register_step_post_hook(after)
    return optimizer
