"""What a forward hands over: the tensors in its output, however nested, and those that its modules have put aside."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from terrazzo.engine.loop.scaler import LossScaler, scale_backward
from terrazzo.errors import Misuse

__all__ = ["PLAIN", "leaves_of", "map_tensors", "put_aside", "restore_asides", "scale_asides", "scale_output"]

PLAIN = (Tensor, bool, int, float, str, type(None))
"""Leaves that hide no tensor."""


def leaves_of(output: Any) -> list[Any]:
    """The leaves of a nested structure; dataclasses, and classes of mappings, are opened too."""
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        parts = _parts(leaf)
        leaves += [leaf] if parts is None else leaves_of([*parts.values()])
    return leaves


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """What torch takes for a leaf, by name; None for what cannot be opened and made anew."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = (field.name for field in dataclasses.fields(leaf))
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return {**leaf} if isinstance(leaf, MutableMapping) else None


def put_aside(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Tensors with a gradient function among the attributes of modules. On torch's own only hooks put any."""
    own = (module for module in modules if not type(module).__module__.startswith("torch.nn.") or module._forward_hooks)
    values = (value for module in own for value in vars(module).values())
    return [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


def map_tensors(
    change: Callable[[Tensor], Tensor], output: Any, closed: Callable[[Any], None] = lambda leaf: None
) -> Any:
    """The structure of `output` with its tensors changed.

    Args:
        closed: told of each other leaf that cannot be opened; it stays as it is.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        parts = _parts(leaf)
        if parts is None:
            closed(leaf)
            return leaf
        made = copy.copy(leaf)
        for name, part in parts.items():
            _set(made, name, tree_map(changed, part))
        return made

    return tree_map(changed, output)


def _set(made: Any, name: Any, value: Any) -> None:
    if not dataclasses.is_dataclass(made):
        made[name] = value
        return
    try:
        setattr(made, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(made, name, value)


# -- under fp16 --------------------------------------------------------------------------------------------------------


def scale_output(output: Any, scaler: LossScaler) -> Any:
    """The structure of `output` in fp32, whose gradients are multiplied by the scale on their way in.

    Raises:
        Misuse: for an object that cannot be opened and has a tensor with a gradient, which would lack the scale.
    """

    def scaled(tensor: Tensor) -> Tensor:
        return scale_backward(tensor, scaler) if tensor.is_floating_point() else tensor

    return map_tensors(scaled, output, _check_closed)


def _check_closed(leaf: Any) -> None:
    held = dict(getattr(leaf, "__dict__", {}))
    if isinstance(leaf, Mapping | list | tuple):
        held |= leaf if isinstance(leaf, Mapping) else dict(enumerate(leaf))
    for name, value in held.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise Misuse(
                f"The model returned a {type(leaf).__name__}, and the loss scale of fp16 is missing from gradients of "
                f"its {name!r}. Return every tensor that a loss is computed from out of the model's forward, in "
                "tuples, lists, dicts or dataclasses."
            )


def scale_asides(model: nn.Module, scaler: LossScaler) -> None:
    """A forward has ended: what modules have put aside in attributes, or in lists and dicts there, is as an output is.

    Inside of a forward it is not: there its gradient comes from the outputs, which have been scaled. So the next one
    begins with `restore_asides`.
    """

    def scaled(tensor: Tensor) -> Tensor:
        if _unscaled(tensor) is not None:
            return tensor
        made = scale_backward(tensor, scaler)
        made.grad_fn.unscaled = tensor  # type: ignore[union-attr]
        return made

    with torch.inference_mode(False), torch.enable_grad():
        _change_asides(model, scaled)


def restore_asides(model: nn.Module) -> None:
    """A forward begins: the reverse, except for what has been replaced or changed in place."""

    def restored(tensor: Tensor) -> Tensor:
        unscaled = _unscaled(tensor)
        return tensor if unscaled is None else unscaled

    _change_asides(model, restored)


def _unscaled(tensor: Tensor) -> Tensor | None:
    unscaled: Tensor | None = getattr(tensor.grad_fn, "unscaled", None)
    return unscaled


_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of every module, which hold nothing that a forward computes."""


def _change_asides(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """`change` differentiable tensors in attributes of modules, and in lists, dicts, tuples and dataclasses there."""
    seen: set[int] = set()
    for module in model.modules():
        own = vars(module)
        for name in own.keys() - _OF_MODULES:
            if (made := _changed(own[name], change, seen)) is not own[name]:
                own[name] = made


def _changed(value: Any, change: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    """What is to be in the place of `value`: itself, but for tensors, and tuples that have any."""
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else change(value)
    if isinstance(value, tuple):
        parts = [_changed(each, change, seen) for each in value]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    is_made = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_made or isinstance(value, list | dict)) or id(value) in seen:
        return value
    seen.add(id(value))
    if is_made:
        held = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        held = [*(value.items() if isinstance(value, dict) else enumerate(value))]
    for key, each in held:
        if (made := _changed(each, change, seen)) is not each:
            _set(value, key, made)
    return value
