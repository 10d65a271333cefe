"""Memory without a value, told from what has one: what a module forgets to set is found, and never trained."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_unset", "unset"]

_UNSET_BYTE = 0xA5
"""Byte of a bool without a value; those with one are 0 or 1."""


def _unset_integer(dtype: torch.dtype) -> int:
    """An integer that fills no tensor of that dtype: neither a default, nor a limit, nor a count."""
    return torch.iinfo(dtype).max - 90


def unset(like: Tensor, device: torch.device) -> Tensor:
    """Memory of that shape and dtype without a value: `is_unset` tells it from what has one."""
    made = torch.empty_like(like, device=device)
    if made.is_floating_point() or made.is_complex():
        return made.fill_(float("nan"))
    if made.dtype == torch.bool:
        made.view(torch.uint8).fill_(_UNSET_BYTE)
        return made
    return made.fill_(_unset_integer(made.dtype))


def is_unset(values: Tensor) -> bool:
    """Whether any element of a floating tensor has no value yet; of a tensor of integers, whether all have none."""
    values = values.detach()
    if not values.numel():
        return False
    if values.dtype == torch.bool:
        return bool((values.view(torch.uint8) == _UNSET_BYTE).all())
    if not (values.is_floating_point() or values.is_complex()):
        return bool((values == _unset_integer(values.dtype)).all())
    real = torch.view_as_real(values) if values.is_complex() else values
    return bool((real if real.itemsize > 1 else real.float()).max().isnan())  # without a mask of so many bytes
