"""`launch.ranks: 2:4`, from two ranks to four: how it is told from a number, and what it may be.

To YAML 1.1 it is a number in base 60, 124. Under a key `ranks` it is text, in a file and in an override.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["checked_range", "ends_of_range", "is_range"]

_RANGE = re.compile(r"[0-9]{1,9}:[0-9]{1,9}")


def is_range(key: str, text: str) -> bool:
    """Whether what a key, or a dotted key, is given is a range of ranks."""
    return key.rpartition(".")[2] == "ranks" and _RANGE.fullmatch(text) is not None


def checked_range(value: Any) -> str:
    """A range in its one spelling. Raises: `ValueError` for what is none."""
    if not isinstance(value, str) or not _RANGE.fullmatch(value):
        raise ValueError(f"{value!r} is neither a number of ranks nor a range of them, least:most, such as 2:4")
    least, most = ends_of_range(value)
    if not 0 < least < most:
        meant = f"{max(1, min(least, most))}:{max(least, most)}" if least != most else str(max(1, most))
        raise ValueError(f"'{value}' is no range of ranks, which is least:most: write {meant}")
    return f"{least}:{most}"


def ends_of_range(text: str) -> tuple[int, int]:
    """The least and the most of a range."""
    least, most = map(int, text.split(":"))
    return least, most
