"""What a forward hands over: the tensors in its output, however nested, and those that its modules have put aside."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.runtime.private_torch import tree_leaves, tree_map

__all__ = ["PLAIN", "leaves_of", "map_asides", "map_tensors", "put_aside"]

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


_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of every module, which hold nothing that a forward computes."""


def map_asides(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """`change` differentiable tensors in attributes of modules, in lists, deques, dicts, tuples and dataclasses there,
    and in the attributes of other objects there.
    """
    seen: set[int] = set()
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        _change_held(vars(module), own, change, seen)
        for each in own.values():
            if _is_plain(each) and id(each) not in seen:
                seen.add(id(each))
                _change_held(vars(each), dict(vars(each)), change, seen)


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
    if not (is_made or isinstance(value, list | dict | deque)) or id(value) in seen:
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


def _change_held(
    held: dict[str, Any], some: dict[str, Any], change: Callable[[Tensor], Tensor], seen: set[int]
) -> None:
    """The same of `some` attributes of an object, which are `held` there; other objects among them stay closed."""
    for name, each in some.items():
        if (made := _changed(each, change, seen)) is not each:
            held[name] = made


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's own class, which has attributes, and no module."""
    foreign = type(value).__module__.partition(".")[0] in ("builtins", "torch", "terrazzo")
    return not foreign and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
