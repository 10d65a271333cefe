"""What two configurations mean differently, whatever their dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from terrazzo.dialects.core.agreement import agree_on, extras_by_key, has_no_effect
from terrazzo.dialects.core.description import MEANING, PATHS, Description, Setting, asks_for_nothing

__all__ = ["SettingDifference", "compare"]


@dataclass(frozen=True)
class SettingDifference:
    """One setting.

    Attributes:
        path: of the neutral setting, or the key of an extra of two files of one dialect.
        kind: `value`: both say it, and not the same; `a` or `b`: only that one does, the other leaves it to code.
    """

    path: str
    meaning: str
    kind: Literal["value", "a", "b"]
    a: Setting[Any]
    b: Setting[Any]


def compare(a: Description, b: Description) -> list[SettingDifference]:
    """Every difference, in the order of the sections. What one leaves to code and the other turns off is none."""
    differences = []
    for path in PATHS:
        one, other = a[path], b[path]
        if one.is_set and other.is_set:
            if not agree_on(path, a, b):
                differences.append(SettingDifference(path, MEANING[path], "value", one, other))
        elif one.is_set != other.is_set:
            one_sided = one if one.is_set else other
            if not asks_for_nothing(path, one_sided.value) and not has_no_effect(a if one.is_set else b, path):
                differences.append(SettingDifference(path, MEANING[path], "a" if one.is_set else "b", one, other))
    return differences + (_extras(a, b) if a.dialect == b.dialect else [])


def _extras(a: Description, b: Description) -> list[SettingDifference]:
    ours, theirs = extras_by_key(a), extras_by_key(b)
    differences = []
    for key in dict.fromkeys([*ours, *theirs]):
        one, other = (
            Setting(side[key].value, "file", key) if key in side else Setting(None, "unset") for side in (ours, theirs)
        )
        said = [side[key] for side in (ours, theirs) if key in side]
        if (len(said) == 1 and said[0].usual) or (len(said) == 2 and one.value == other.value):
            continue
        meaning = said[0].why
        kind: Literal["value", "a", "b"] = "value" if len(said) == 2 else "a" if one.is_set else "b"
        differences.append(SettingDifference(key, meaning, kind, one, other))
    return differences
