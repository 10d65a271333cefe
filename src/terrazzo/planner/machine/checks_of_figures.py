"""What figures of a machine may be: a nan, a minus or a misspelt format would make all that is derived of it wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.messages import did_you_mean

__all__ = ["check_amounts", "check_counts", "check_rates", "check_word"]


def check_amounts(
    owner: object, names: Iterable[str], *, zero: bool = False, unknown: bool = True, most: float = math.inf
) -> None:
    """Attributes of `owner` that are finite numbers.

    Args:
        zero: 0 may be. unknown: None may be. most: the largest.

    Raises: `BadInput` for what is none.
    """
    for name in names:
        value = getattr(owner, name)
        if value is None and unknown:
            continue
        if not is_number(value) or not math.isfinite(value) or value < 0 or (value == 0 and not zero) or value > most:
            up_to = "" if most == math.inf else f" and up to {most:g}"
            bound = "0 or more" if zero else f"above 0{up_to}"
            raise _refused(owner, name, value, f"a finite number, {bound}", unknown)


def check_counts(owner: object, names: Iterable[str], *, unknown: bool = False) -> None:
    """Attributes that are ints of 1 or more. Raises: `BadInput` for what is none."""
    for name in names:
        value = getattr(owner, name)
        if not (is_count(value) or (value is None and unknown)):
            raise _refused(owner, name, value, "an int, 1 or more", unknown)


def check_rates(owner: object, name: str, known: Collection[str]) -> None:
    """An attribute that maps some of the `known` words to numbers above 0. Raises: `BadInput` for another."""
    rates = getattr(owner, name)
    if not isinstance(rates, Mapping):
        raise _refused(owner, name, rates, f"a number for each of some of {', '.join(known)}", unknown=False)
    for word, rate in rates.items():
        if word not in known:
            near = did_you_mean(str(word), known)
            raise BadInput(f"{_named(owner)}: {name} has {word!r}; keys are {', '.join(known)}.{near}")
        if not is_number(rate) or not math.isfinite(rate) or rate <= 0:
            raise _refused(owner, f"{name}[{word!r}]", rate, "a finite number, above 0, or leave it out", unknown=False)


def check_word(owner: object, name: str, known: Collection[str]) -> None:
    """An attribute that is one of a few words. Raises: `BadInput` for another."""
    if (value := getattr(owner, name)) not in known:
        raise _refused(owner, name, value, f"one of {', '.join(known)}", unknown=False)


def _refused(owner: object, name: str, value: Any, may_be: str, unknown: bool) -> BadInput:
    return BadInput(f"{_named(owner)}: {name} is {value!r}; give {may_be}{', or None if not known' * unknown}.")


def _named(owner: object) -> str:
    name = getattr(owner, "name", None)
    return type(owner).__name__ if name is None else f"{type(owner).__name__} {name!r}"
