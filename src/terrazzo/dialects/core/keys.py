"""What a library's configuration knows: one row for every key, with all that is to be said of the key.

    KEYS = {
        "training.steps": Key(integer(1), 10_000, "optimizer steps"),
        "training.gc_freq": Key(ANY, 50, "steps between collections of Python's garbage", "harmless"),
    }

A row without `loss` has a place in the neutral description, and a reader that asks for it by `Reader.take`; the others
are kept as they are, by `Reader.keep_rows`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from terrazzo.dialects.core.key_verdict import Loss

__all__ = [
    "ANY",
    "BOOLEAN",
    "MISSING",
    "NAME_LIST",
    "TEXT",
    "Key",
    "RowLoss",
    "Rows",
    "Type",
    "choice",
    "integer",
    "matches",
    "meaning_of",
    "number",
    "row_of",
    "section",
]

RowLoss = Loss | Literal[""]
"""What a row says is lost; empty: see `Key.loss`."""
ONE_OF = "one of "
"""How the `expected` of a `choice` begins."""
MISSING = object()
"""What `Type.parse` returns for a value of another type or out of range."""


@dataclass(frozen=True)
class Type:
    """What a key takes.

    Attributes:
        expected: in words.
        parse: from the value as it stands there to the neutral one; `MISSING` where it is of another type.
    """

    expected: str
    parse: Callable[[Any], Any]


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        type: of its value.
        default: the library's, as a document would say it.
        meaning: in a few words.
        loss: what another dialect loses without it: nothing (`harmless`), something (`lossy`), or the same numbers
            (`refused`). Empty: it has a place in the neutral description, and a reader of its own. A key that is read
            in some documents alone has both: its reader there, and elsewhere this.
        why: the loss in words; default: the meaning.
        here: what says it in Terrazzo's own configuration, where that has no setting of the neutral description.
        lost_beside: another key, or a section, beside which the library does something by the default, too: the loss
            is the default's as well, whether or not the document says it. Empty: at the default nothing is lost.
        null: whether null says nothing rather than something wrong; default: where the default is
            None, and of any names or anything.
    """

    type: Type
    default: Any
    meaning: str
    loss: RowLoss = ""
    why: str = ""
    lost_beside: str = ""
    null: bool | None = None
    here: str = ""

    @functools.cached_property
    def neutral(self) -> Any:
        """The default in neutral words; None where it is left open."""
        value = self.type.parse(self.default)
        return None if value is MISSING else value

    @property
    def nullable(self) -> bool:
        return (self.default is None or self.type in (ANY, NAME_LIST)) if self.null is None else self.null


Rows = Mapping[str, Key | tuple[Any, str]]
"""Keys of one section by their last parts. A default and a meaning alone are a row of `ANY`, kept as the section is."""


def section(name: str, rows: Rows, loss: RowLoss = "", why: str = "") -> dict[str, Key]:
    """Rows under the dotted name of their section, the top for an empty one.

    Args:
        loss, why: what is lost with a row that does not say it itself; see `Key`.
    """
    made = {key: row if isinstance(row, Key) else Key(ANY, *row, loss, why) for key, row in rows.items()}
    return {f"{name}.{key}" if name else key: row for key, row in made.items()}


def matches(key: str, pattern: str) -> bool:
    """Whether a dotted key is one of a pattern's: `<...>` is any one name, `.*` at the end anything below."""
    parts = [r"[^.]+" if part.startswith("<") else re.escape(part) for part in pattern.removesuffix(".*").split(".")]
    anything = r"(\..+)?" if pattern.endswith(".*") else ""
    return re.fullmatch(r"\.".join(parts) + anything, key) is not None


def row_of(keys: Mapping[str, Key], key: str) -> Key | None:
    """The row of a key: its own, else that of the first pattern that it is one of."""
    patterns = (row for name, row in keys.items() if name[-1] in "*>" and matches(key, name))
    return keys.get(key) or next(patterns, None)


def meaning_of(keys: Mapping[str, Key], key: str) -> str:
    """What a key does, as its row says; empty where there is none."""
    row = row_of(keys, key)
    return row.meaning if row else ""


# -- types ---------------------------------------------------------------------------------------------------------


def integer(low: int = 0, high: int | None = None) -> Type:
    """A whole number, also written `8.0` or `5e8`."""

    def parse(value: Any) -> Any:
        parsed = _number(value, low, high)
        fits = parsed is not MISSING and abs(parsed) <= _LARGEST and parsed == int(parsed)
        return int(parsed) if fits else MISSING

    return Type(f"a whole number from {low}{'' if high is None else f' to {high}'}", parse)


def number(low: float = 0.0, high: float | None = None) -> Type:
    """Any number, also written `1e-3` as text."""
    top = "" if high is None else f" to {high:g}"
    return Type(f"a number from {low:g}{top}", lambda value: _number(value, low, high))


def choice(choices: Mapping[Any, Any], *, fold: bool = True) -> Type:
    """One of some words or numbers, as what it stands for. `fold`: upper case is as lower case; keys are lower."""
    known = {(isinstance(each, bool), each): meant for each, meant in choices.items()}  # True == 1

    def parse(value: Any) -> Any:
        word = value.lower() if fold and isinstance(value, str) else value
        return known.get((isinstance(word, bool), word), MISSING) if isinstance(word, str | int | float) else MISSING

    return Type(f"{ONE_OF}{', '.join(dict.fromkeys(str(each) for each in choices))}", parse)


def _number(value: Any, low: float, high: float | None) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][-+]?[0-9]{1,2})?\s*", value):
        value = float(value)  # what YAML 1.1 takes for text, such as 1e-3, and every library here for a number
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (_INF, -_INF):
        return MISSING
    return value if value >= low and (high is None or value <= high) else MISSING


_INF = float("inf")
_LARGEST = 2**63 - 1
"""The largest whole number that a file may hold: see `documents`. A library's `1e308` steps are refused too."""


def _switch(value: Any) -> Any:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower(), MISSING)


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return MISSING


BOOLEAN = Type("true or false", _switch)
"""True or false, also as the words."""
TEXT = Type("text", lambda value: value if isinstance(value, str) else MISSING)
NAME_LIST = Type("a list of names", _names)
"""A list of names, or one text with commas, as a tuple."""
ANY = Type("a value", lambda value: value)
