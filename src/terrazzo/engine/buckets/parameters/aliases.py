"""Tensors of users in memory that is the engine's, such as `parameter.detach()` and what is cut from it."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.errors import BadInput, listed

__all__ = ["check_views", "leave_memory"]


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


def check_views(model: nn.Module) -> None:
    """Refuse tensors that share memory with parameters and are kept on modules: sharding would leave them behind.

    What a hook of its module computes anew before each forward, as those of weight and spectral norms do, may stay.

    Raises:
        BadInput: there.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    extents = sorted((_start(each), each.nbytes, name) for name, each in model.named_parameters() if _start(each))
    starts, views = [start for start, _, _ in extents], []
    for name, module in model.named_modules():
        computed = {_computed_by(hook) for hook in module._forward_pre_hooks.values()}
        for attribute, tensor in _kept_on(module) if extents else ():
            start, nbytes, whole = extents[max(bisect.bisect_right(starts, _start(tensor)) - 1, 0)]
            if start <= _start(tensor) < start + nbytes and id(tensor) not in parameters and attribute not in computed:
                views.append((f"{name}.{attribute}".removeprefix("."), whole))
    if views:
        which = listed([f"{view!r} of {whole!r}" for view, whole in views])
        raise BadInput(
            f"Views of parameters are kept on modules: {which}. They would keep the values of now, while the "
            "parameters move into the engine's memory. Make the view in forward, or keep a copy: 'x.detach().clone()'."
        )


def _computed_by(hook: Any) -> str | None:
    """The attribute that one of torch's own hooks sets before each forward."""
    name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
    return name if isinstance(name, str) else None


def _kept_on(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for attribute, value in [*vars(module).items(), *module._buffers.items()]:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from ((attribute, each) for each in inside if isinstance(each, Tensor))


def _start(tensor: Tensor) -> int:
    """Address at which a tensor's memory begins; 0 for none."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0
