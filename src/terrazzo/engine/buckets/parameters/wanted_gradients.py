"""Parameters that `torch.autograd.grad` and `backward(inputs=...)` are given, as what gradients are wanted of.

Their values are not asked for, so that they may be elsewhere: torch is given their edges in autograd's graph in their
place. Left to the class of a tensor, torch would run all of a backward without `__torch_function__`, recomputed
forwards too, and nothing would be gathered that these come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.errors import Misuse

__all__ = ["DIFFERENTIATE", "differentiated"]

DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)
"""They are given what gradients are wanted of; `Tensor.backward` calls the second."""


def differentiated(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What one of `DIFFERENTIATE` returns, as these call `__torch_function__`: roots first, and tuples of tensors.

    `NotImplemented` where a parameter of a sharded model is a root, which is read.
    """
    roots, *rest = args
    if any(map(_is_ours, roots)):
        return NotImplemented
    named = dict(kwargs)
    if func is torch.autograd.backward:
        named["inputs"] = tuple(map(_edge, named["inputs"]))
        return func(roots, *rest, **named)
    wanted, makes_zeros = rest[0], named.pop("materialize_grads", False)  # which torch refuses for edges
    found = func(roots, tuple(map(_edge, wanted)), *rest[1:], **named)
    return tuple(map(_or_zeros, found, wanted)) if makes_zeros else found


def _is_ours(root: Any) -> bool:
    return isinstance(root, nn.Parameter) and note_of(root) is not None


def _edge(wanted: Any) -> Any:
    if not _is_ours(wanted):
        return wanted
    if not wanted.requires_grad:
        name = wanted.terrazzo_note.name
        raise Misuse(
            f"The gradient of {name!r} was asked for, by torch.autograd.grad or backward(inputs=...), and that is "
            "frozen: its requires_grad is False. Leave it out, or unfreeze it before tz.shard."
        )
    with plainly():
        return get_gradient_edge(wanted)


def _or_zeros(found: Tensor | None, wanted: Tensor | GradientEdge) -> Tensor | None:
    if found is not None or isinstance(wanted, GradientEdge):
        return found
    return torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
