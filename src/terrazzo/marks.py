"""Values that one part of the program leaves on a user's module or mesh, for another part to find there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = [
    "MARKED_TO_SHARD",
    "SHARES_EXPERTS",
    "SHARES_MATRICES",
    "SHARES_SEQUENCES",
    "UNIT",
    "Mark",
    "is_sharded",
    "waits_for_root",
]

T = TypeVar("T")


class Mark(Generic[T]):
    """An attribute on objects that are not Terrazzo's, which stays with them, also in copies.

    On a module it is a plain attribute, whatever it holds: never a parameter, buffer or submodule.

    Args:
        name: of the attribute, beginning with "terrazzo_".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def leave(self, owner: object, value: T) -> T:
        vars(owner)[self._name] = value
        return value

    def find(self, owner: object) -> T | None:
        found: T | None = vars(owner).get(self._name)
        return found

    def of(self, owner: object) -> T:
        """The value on `owner`; raises `KeyError` if there is none."""
        left: T = vars(owner)[self._name]
        return left

    def all_in(self, model: nn.Module) -> Iterator[T]:
        """The values on the modules of `model`."""
        return (vars(module)[self._name] for module in model.modules() if self._name in vars(module))


SHARES_MATRICES, SHARES_SEQUENCES = Mark[Any]("terrazzo_tensor_ranks"), Mark[Any]("terrazzo_context")
SHARES_EXPERTS = Mark[Any]("terrazzo_experts")
"""On modules that share matrices, sequences or experts: what they exchange through, with the `traffic` of that."""
MARKED_TO_SHARD = Mark[Any]("terrazzo_fully_shard")
"""On modules that `fully_shard` was called on: something whose `root` is None until the model is sharded."""
UNIT = Mark[str]("terrazzo_unit")
"""On modules of a sharded model whose weights are gathered as one: their names."""


def is_sharded(module: nn.Module) -> bool:
    """Whether it is a sharded model: not of one inside of that. Asking shards none that waits for `fully_shard`."""
    return "_terrazzo" in vars(module)


def waits_for_root(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on it, and the model that it is in is not sharded yet."""
    mark = MARKED_TO_SHARD.find(module)
    return mark is not None and mark.root is None
