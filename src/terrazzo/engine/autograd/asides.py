"""Tensors that modules have put aside in a forward, such as an auxiliary loss, for whoever reads them afterwards."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.autograd.outputs import set_part

__all__ = ["map_asides", "put_aside"]


def put_aside(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Tensors with a gradient function among the attributes of modules. On torch's own only hooks put any.

    Asked of every unit in every forward, so containers stay closed: a backward that comes by a tensor in one is not
    announced, but met by what autograd has kept of the weights.
    """
    own = (module for module in modules if not type(module).__module__.startswith("torch.nn.") or module._forward_hooks)
    values = (value for module in own for value in vars(module).values())
    return [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of every module, which hold nothing that a forward computes."""


def map_asides(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """`change` differentiable tensors in attributes of modules, in lists, deques, dicts, tuples and dataclasses there,
    and in the attributes of other objects there.
    """
    seen: set[int] = set()
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        _change_attributes(vars(module), own, change, seen)
        for each in own.values():
            if _is_plain(each) and id(each) not in seen:
                seen.add(id(each))
                _change_attributes(vars(each), dict(vars(each)), change, seen)


def _changed(value: Any, change: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    """What is to stand in the place of `value`: `value` itself, but for tensors, and tuples that have any."""
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else change(value)
    if isinstance(value, tuple):
        parts = [_changed(each, change, seen) for each in value]
        if all(map(operator.is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    is_made = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_made or isinstance(value, list | dict | deque)) or id(value) in seen:
        return value
    seen.add(id(value))
    if is_made:
        entries = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        entries = [*(value.items() if isinstance(value, dict) else enumerate(value))]
    for key, each in entries:
        if (made := _changed(each, change, seen)) is not each:
            set_part(value, key, made)
    return value


def _change_attributes(
    attributes: dict[str, Any], some: dict[str, Any], change: Callable[[Tensor], Tensor], seen: set[int]
) -> None:
    """Change differentiable tensors in `some` of an object's `attributes`; other objects among them stay closed."""
    for name, each in some.items():
        if (made := _changed(each, change, seen)) is not each:
            attributes[name] = made


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's own class, which has attributes, and no module."""
    is_known = type(value).__module__.partition(".")[0] in ("builtins", "torch", "terrazzo")
    return not is_known and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
