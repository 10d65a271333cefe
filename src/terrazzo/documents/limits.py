"""What no configuration is: nested so deep, of so many values, or with numbers so large."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.untrusted_files import is_deeper

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_VALUES", "check_depth", "check_values", "key_twice", "too_many"]

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_NUMBER = 2**63


def check_depth(steps: Iterator[int], origin: str) -> None:
    """Refuse what is nested too deep, by its steps down (1) and up (-1)."""
    if is_deeper(steps, MAX_DEPTH):
        raise BadInput(f"'{origin}' is nested more than {MAX_DEPTH} deep; no configuration is: name another file.")


def key_twice(key: str, origin: str, line: int) -> BadInput:
    """The error for a key that a section has twice."""
    return BadInput(f"'{origin}' line {line}: key '{key}' appears twice in one section: keep one of them.")


def too_many(origin: str) -> BadInput:
    """The error for more values than any configuration holds."""
    return BadInput(f"'{origin}' holds more than {MAX_VALUES:,} values; no configuration does: name another file.")


def check_values(document: Any, origin: str) -> None:
    """Refuse numbers that no setting can have, and more values or text than any configuration holds."""
    budget = [MAX_VALUES, 4 * MAX_BYTES]

    def walk(key: str, value: Any) -> None:
        budget[0] -= 1
        budget[1] -= len(value) if isinstance(value, str) else 0
        if min(budget) < 0:
            raise too_many(origin)
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(key, name)
                walk(f"{key}.{name}" if key else name, inner)
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadInput(f"'{origin}': {key} holds half a character ({value!a:.60}), which is no text: write it out.")
        elif isinstance(value, list):
            for inner in value:
                walk(key, inner)
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"'{origin}': {key} is {value}, which is not a number that a setting can have: write one.")
        elif isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise BadInput(
                f"'{origin}': {key} is a number of {value.bit_length()} bits, more than any setting has: correct it."
            )

    walk("" if isinstance(document, dict) else "it", document)
