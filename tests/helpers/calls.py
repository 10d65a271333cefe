"""How much work Python does, told by what it counts: a clock would tell of what else the machine does."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["calls_of"]


def calls_of(work: Callable[[], object]) -> int:
    """Functions called, of Python and of C; on a quiet core of 2020 some 4 million take a second."""
    count = 0

    def told(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(told)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
