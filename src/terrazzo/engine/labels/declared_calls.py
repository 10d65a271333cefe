"""Calls that every rank makes together, as errors name them: each is declared where it is made.

A rank that meets another in a call which it has not declared itself, since it has not imported what makes it, knows no
name for it. Where an exchange fails it reads that in the other's report.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from terrazzo.engine.labels.numbered import Numbered, text_number

__all__ = ["DECLARED_CALLS", "NUMBERED_CALLS", "declare_call"]


class DeclaredCall(NamedTuple):
    """A call of all ranks.

    Attributes:
        text: as a user writes it, such as `tz.EMA(model)`.
        edit: what errors ask for where other ranks are elsewhere.
    """

    text: str
    edit: str


_declared: dict[int, DeclaredCall] = {}
DECLARED_CALLS: Mapping[int, DeclaredCall] = MappingProxyType(_declared)
"""All that this process has declared, by number."""


def declare_call(text: str, edit: str) -> int:
    """Declare a call; its number, by which messages say it.

    Raises:
        ValueError: another call has that number, or the same text and another edit: one of them needs other words.
    """
    call, number = DeclaredCall(text, edit), text_number(text)
    if (there := _declared.setdefault(number, call)) != call:
        raise ValueError(f"{call} and {there} would have the same number in messages: word one of them otherwise")
    return number


NUMBERED_CALLS = Numbered(lambda names: {number: call.text for number, call in _declared.items()}, str, "another call")
