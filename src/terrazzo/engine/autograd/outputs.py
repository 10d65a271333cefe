"""What a forward hands over: the tensors in its output, however nested."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

from terrazzo.engine.runtime.private_torch import tree_leaves, tree_map

__all__ = ["PLAIN", "leaves_of", "map_tensors", "set_part"]

PLAIN = (Tensor, bool, int, float, str, type(None))
"""Leaves that hide no tensor."""


def leaves_of(output: Any) -> list[Any]:
    """The leaves of a nested structure; dataclasses, and classes of mappings, are opened too, each once."""
    leaves, opened = list[Any](), dict[int, Any]()  # what is opened is kept, so that its number stays its own
    waiting = deque(tree_leaves(output))
    while waiting:
        parts = _parts(leaf := waiting.popleft())
        if parts is None:
            leaves.append(leaf)
        elif id(leaf) not in opened:
            opened[id(leaf)] = leaf
            waiting += tree_leaves([*parts.values()])
    return leaves


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """What torch takes for a leaf, by name; None for what cannot be opened and made anew."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = (field.name for field in dataclasses.fields(leaf))
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return {**leaf} if isinstance(leaf, MutableMapping) else None


def map_tensors(
    change: Callable[[Tensor], Tensor], output: Any, closed: Callable[[Any], None] = lambda leaf: None
) -> Any:
    """The structure of `output` with its tensors changed; what is in it at several places stays one object.

    Args:
        closed: called with each other leaf that cannot be opened; it stays as it is.
    """
    return tree_map(functools.partial(_changed, change, closed, {}), output)


def _changed(
    change: Callable[[Tensor], Tensor], closed: Callable[[Any], None], made_of: dict[int, tuple[Any, Any]], leaf: Any
) -> Any:
    """What is to be in the place of `leaf`; `made_of` has what was opened before, by its number, and what that became.

    No closure: one that calls itself would keep the tensors until Python looks for cycles.
    """
    if isinstance(leaf, Tensor):
        return change(leaf)
    if id(leaf) in made_of:
        return made_of[id(leaf)][1]
    if (parts := _parts(leaf)) is None:
        closed(leaf)
        return leaf
    made = copy.copy(leaf)
    made_of[id(leaf)] = leaf, made  # before its parts, which may lead back to it
    for name, part in parts.items():
        set_part(made, name, tree_map(functools.partial(_changed, change, closed, made_of), part))
    return made


def set_part(made: Any, name: Any, value: Any) -> None:
    """Put it into a dataclass, frozen or not, or a mapping or list, under its name there."""
    if not dataclasses.is_dataclass(made):
        made[name] = value
        return
    try:
        setattr(made, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(made, name, value)
