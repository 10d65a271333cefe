"""Numbers that a caller has given. A bool is none of them, although Python counts with it: `prefetch=True` is no 1."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard

__all__ = ["is_count", "is_number", "is_power_of_two"]


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether it is an int, `least` or more.

    One of NumPy is none: counts multiply to sizes that would wrap at 2**63 or end as that type where JSON is written.
    Who takes one makes an int of it first, as the planner's `Request` does.
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one real number, of Python or NumPy; NaN and infinity are."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_power_of_two(value: float) -> bool:
    """Whether it is 2 to some whole power, by which a product of floating-point numbers is exact."""
    return value > 0 and math.frexp(value)[0] == 0.5
