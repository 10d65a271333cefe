"""What is computed once, since a search asks for thousands of setups: all ways in which the planner remembers.

    once_per_setup    a function of a setup and little else; each value is kept with its setup, and goes with it
    once              a function of smaller values that many setups share, such as units; kept by value
    once_of_few       the same, of what is large, so that few are kept
    hashed_once       a frozen dataclass that is looked up often, and hashes its fields the first time alone

Properties are `functools.cached_property`, tables that are read once `functools.cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Protocol, TypeVar, TypeVarTuple

__all__ = ["hashed_once", "once", "once_of_few", "once_per_setup"]

R = TypeVar("R")
Rest = TypeVarTuple("Rest")


class Remembering(Protocol):
    """A setup, which has a place for what `once_per_setup` remembers of it."""

    @property
    def known(self) -> dict[tuple[Any, ...], Any]: ...


S = TypeVar("S", bound=Remembering)
C = TypeVar("C", bound=type)

once = lru_cache(maxsize=8192)
"""Decorates a function of hashable values; of the values that it was asked for last, so many are kept."""

once_of_few = lru_cache(maxsize=256)
"""The same, of values that are large: lists of all that a step does."""


def once_per_setup(find: Callable[[S, *Rest], R]) -> Callable[[S, *Rest], R]:
    """Decorate a function of a setup so that it computes each value once: one estimate asks for some ten times.

    A cache by value would compare all fields of a setup each time.
    """

    @wraps(find)
    def remembered(setup: S, *rest: *Rest) -> R:
        key, known = (find, *rest), setup.known
        if key not in known:
            known[key] = find(setup, *rest)
        value: R = known[key]
        return value

    return remembered


def hashed_once(cls: C) -> C:
    """Decorate a frozen dataclass so that an instance computes its hash once; copies by `replace` compute their own."""
    compute: Callable[[Any], int] = vars(cls)["__hash__"]

    def hash_once(self: Any) -> int:
        try:
            value: int = self._hash
        except AttributeError:
            value = vars(self)["_hash"] = compute(self)
        return value

    cls.__hash__ = hash_once  # type: ignore[method-assign, assignment]
    return cls
