"""Nested mappings and lists, as files describe them, with `Values` where tensors are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from terrazzo.checkpoint.importers.parts.values import LoadedTensor, Values
from terrazzo.errors import BadInput

__all__ = ["Unusable", "as_tree", "flattened", "keep"]

_MAX_DEPTH = 64
_MAX_REPEATED = 100_000


@dataclass(frozen=True)
class Unusable:
    """Stands where something could not be taken, and says why."""

    reason: str


def as_tree(value: Any, where: str) -> Any:
    """`value`, as an unpickler made it, as a tree of dicts and lists.

    Raises:
        BadInput: it contains itself, or parts of it so often that it would not fit into memory; `where` names it.
    """
    return _Converter(where).convert(value, "", 0)[0]


class _Converter:
    """Converts each container once. A file of a few bytes can describe lists in lists that are endless, or nearly."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._done: dict[int, tuple[Any, int]] = {}
        self._nodes = 0

    def convert(self, value: Any, path: str, depth: int) -> tuple[Any, int]:
        """The tree of `value`, and how many nodes it would have without sharing."""
        if isinstance(value, Tensor):
            return self._tensor(value, path), 1
        if not isinstance(value, Mapping | list | tuple | set):
            return value, 1
        if id(value) not in self._done:
            if depth == _MAX_DEPTH:
                raise BadInput(f"'{self._where}' has containers in containers {depth} deep: it is damaged.")
            self._done[id(value)] = self._container(value, path, depth)
        return self._done[id(value)]

    def _tensor(self, value: Tensor, path: str) -> Values | Unusable:
        try:
            return LoadedTensor(value, f"{path} in '{self._where}'")
        except BadInput as error:
            return Unusable(str(error))

    def _container(self, value: Any, path: str, depth: int) -> tuple[Any, int]:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        converted = {key: self.convert(item, f"{path}.{key}" if path else str(key), depth + 1) for key, item in pairs}
        numel = 1 + sum(count for _, count in converted.values())
        self._nodes += 1 + len(converted)
        if numel > _MAX_REPEATED + 16 * self._nodes:
            raise BadInput(f"'{self._where}' repeats the same values {numel} times at {path}: it is damaged.")
        items = {key: item for key, (item, _) in converted.items()}
        return (items if isinstance(value, Mapping) else list(items.values())), numel


def flattened(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, their keys joined by dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _NotPlain(Exception):
    """Raised for what JSON cannot hold."""


def keep(into: dict[str, Any], key: str, value: Any, left: list[str], path: str = "") -> None:
    """Put `value` into `into` as JSON holds it. What JSON cannot hold is left out, and `left` gets a line about it."""
    path = f"{path}.{key}" if path else key
    if isinstance(value, Mapping):
        inner: dict[str, Any] = {}
        for name, item in value.items():
            keep(inner, str(name), item, left, path)
        if inner or not value:
            into[key] = inner
        return
    try:
        into[key] = _plain(value)
    except _NotPlain as error:
        left.append(f"{path} is not taken over: {error}")


def _plain(value: Any) -> Any:
    if isinstance(value, Values) and value.numel == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Values):
        raise _NotPlain(f"a tensor of {value.numel} elements")
    raise _NotPlain(value.reason if isinstance(value, Unusable) else type(value).__name__)
