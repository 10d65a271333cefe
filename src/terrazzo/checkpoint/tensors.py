"""What of a checkpoint is torch's: dtypes by name, and the bytes of a tensor. The files themselves need no torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "dtype_of", "name_of"]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name in `manifest.DTYPES`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """What torch calls a dtype; `manifest.DTYPES` has the names of those that a file can hold."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a 1-D tensor; those of one on the CPU are its own and not a copy."""
    data: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(data)
