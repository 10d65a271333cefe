"""What labels have numbers of, such as units, and the names that a rank knows of these."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "INDEX_BITS",
    "NUMBERED_EXPERTS",
    "NUMBERED_MEASURES",
    "NUMBERED_MODULES",
    "NUMBERED_UNITS",
    "Names",
    "Numbered",
    "text_number",
    "unit_title",
]

INDEX_BITS = 24
"""Bits that a label has for the number of what is moved."""


@dataclass(frozen=True)
class Names:
    """The names of what labels number, as far as this rank knows; each kind of thing has its own.

    Attributes:
        units: of the model.
        modules: that exchange activations.
        experts: modules of experts.
        measure: the expression that this rank measures.
    """

    units: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    measure: str = ""


class Numbered(NamedTuple):
    """A kind of thing that labels have numbers of.

    Attributes:
        known: names that this rank knows, by number.
        said: the words for one of a name.
        unknown: the words for another, with its number.
    """

    known: Callable[[Names], Mapping[int, str]]
    said: Callable[[str], str]
    unknown: str

    def words(self, number: int, names: Names) -> str:
        """The words for the one of that number."""
        name = self.known(names).get(number)
        return self.unknown.format(number) if name is None else self.said(name)


def unit_title(name: str) -> str:
    """The words for the unit of that name in messages."""
    return f"unit {name!r}" if name else "the root unit"


def text_number(text: str) -> int:
    """The number of what has no place in a list that all ranks have: one of its text, the same on all of them."""
    return zlib.crc32(text.encode()) >> (32 - INDEX_BITS)


NUMBERED_UNITS = Numbered(lambda names: dict(enumerate(names.units)), unit_title, "unit {}")
NUMBERED_MODULES = Numbered(lambda names: dict(enumerate(names.modules)), repr, "layer {}")
NUMBERED_EXPERTS = Numbered(lambda names: dict(enumerate(names.experts)), repr, "module {}")
NUMBERED_MEASURES = Numbered(lambda names: {text_number(names.measure): names.measure}, str, "another measure")
