"""Numbers that a caller has given. A bool is none of them, although Python counts with it: `prefetch=True` is no 1."""

from __future__ import annotations

from numbers import Real
from typing import TypeGuard

__all__ = ["is_count", "is_number"]


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is an int, `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one real number, of Python or NumPy; NaN and infinity are."""
    return isinstance(value, Real) and not isinstance(value, bool)
