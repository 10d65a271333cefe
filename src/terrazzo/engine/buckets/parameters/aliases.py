"""Tensors of users in memory that is the engine's, such as `parameter.detach()` and what is cut from it."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["leave_memory"]


def leave_memory(places: Iterable[Tensor], own: Sequence[Tensor]) -> None:
    """Give copies to all tensors in the memory of `places`, which is about to be written, but parameters and `own`.

    Only Python's collector knows of them; what numpy holds by itself is not among its objects. Takes some 50 ms. Of the
    class of parameters is what optimizers step here, so one that a user has made of such a view stays one.

    Args:
        places: contiguous.
    """
    known = sorted((place.data_ptr(), number, place) for number, place in enumerate(places))
    starts, copies, ours = [start for start, _, _ in known], dict[int, Tensor](), {id(each) for each in own}
    for alias in [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in ours]:
        try:
            start = alias.data_ptr()
        except (NotImplementedError, RuntimeError):  # in a transform of torch.func, or sparse: no view of ours
            continue
        number = bisect.bisect_right(starts, start) - 1
        if number < 0 or not alias.numel() or start >= starts[number] + known[number][2].nbytes:
            continue
        if number not in copies:
            copies[number] = known[number][2].clone()
        offset = (start - starts[number]) // alias.itemsize
        moved = torch.empty(0, dtype=alias.dtype, device=alias.device)
        with torch.no_grad():
            alias.data = moved.set_(copies[number].untyped_storage(), offset, alias.shape, alias.stride())
