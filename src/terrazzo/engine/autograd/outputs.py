"""What a forward hands over: the tensors in its output, however nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

from terrazzo.engine.runtime.private_torch import tree_leaves, tree_map

__all__ = ["PLAIN", "leaves_of", "map_tensors", "set_part"]

PLAIN = (Tensor, bool, int, float, str, type(None))
"""Leaves that hide no tensor."""


def leaves_of(output: Any) -> list[Any]:
    """The leaves of a nested structure; dataclasses, and classes of mappings, are opened too, each once."""
    leaves, opened = list[Any](), dict[int, Any]()

    def collect(part: Any) -> None:
        for leaf in tree_leaves(part):
            if (parts := _parts(leaf)) is None:
                leaves.append(leaf)
            elif id(leaf) not in opened:
                opened[id(leaf)] = leaf  # kept, so that its number stays its own
                collect([*parts.values()])

    collect(output)
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

    made_of: dict[int, tuple[Any, Any]] = {}

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if id(leaf) in made_of:
            return made_of[id(leaf)][1]
        parts = _parts(leaf)
        if parts is None:
            closed(leaf)
            return leaf
        made = copy.copy(leaf)
        made_of[id(leaf)] = leaf, made  # before its parts, which may lead back to it
        for name, part in parts.items():
            set_part(made, name, tree_map(changed, part))
        return made

    return tree_map(changed, output)


def set_part(made: Any, name: Any, value: Any) -> None:
    """Put it into a dataclass, frozen or not, or a mapping or list, under its name there."""
    if not dataclasses.is_dataclass(made):
        made[name] = value
        return
    try:
        setattr(made, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(made, name, value)
