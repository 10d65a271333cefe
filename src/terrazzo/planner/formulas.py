"""What an estimate is made of: terms, and the formula and source behind each, which `--explain` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Formula", "Term"]


@dataclass(frozen=True)
class Formula:
    """A formula as text. Where a name in it is a key of the term's inputs, it is that input."""

    text: str
    source: str


@dataclass(frozen=True)
class Term:
    """One addend of an estimate.

    Attributes:
        name: such as `weights`; unique within an estimate of memory, traffic or time.
        value: expected, in `unit`; never more than `upper`.
        formula: its key, such as `memory.weights`: that of one of `FORMULAS` in the module that computes it.
        inputs: the numbers that were put in.
    """

    name: str
    value: float
    upper: float
    formula: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    unit: Literal["B", "s"] = "B"
