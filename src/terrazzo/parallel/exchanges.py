"""What context-parallel ranks send each other: plain tensors over a process group, of any backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gathered", "pass_on", "summed", "swap"]

# torch 2.13 renamed it; the old name warns there and is the only one before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `own`, `[ranks, ...]`."""
    full = own.new_empty((group.size(), *own.shape))
    _all_gather(full.view(-1), own.contiguous().view(-1), group=group)
    return full


def swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`parts` `[ranks, ...]` has one for each rank; the result has one of each rank."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received.view(-1), parts.contiguous().view(-1), group=group)
    return received


def summed(parts: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The sum of what each rank has for this one in `parts` `[ranks, ...]`.

    Sent in `dtype`, and added in rank order in the dtype of `parts`: the same bits on every backend.
    """
    received = swap(parts.to(dtype), group)
    return functools.reduce(torch.add, received.to(parts.dtype).unbind())


def pass_on(own: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send `own` to the next rank; the result waits for the last one's, of the same shape.

    An exchange of all with all in which others get nothing: all backends have it, and it cannot wait in a circle.
    """
    rank, size = group.rank(), group.size()
    sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
    going, coming = [0] * size, [0] * size
    going[(rank + 1) % size] = coming[(rank - 1) % size] = own.numel()
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), coming, going, group=group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return received if sent is not None else own  # keeps what is being sent

    return arrived
