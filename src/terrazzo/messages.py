"""What messages are made of: counts, sizes, lists, the nearest known word; and warnings.

Errors themselves are in `errors`.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "ALL",
    "GIB",
    "counted",
    "did_you_mean",
    "gib_text",
    "install",
    "listed",
    "nearest",
    "of_ranks",
    "printable",
    "shortened",
    "warn",
]

ALL = "?"
"""Given in place of a name from a table, it is refused with a list of all names."""


GIB = 2**30


def counted(number: int, noun: str) -> str:
    """`"no ranks"`, `"1 rank"`, `"2 ranks"`."""
    return f"{number or 'no'} {noun}{'s' if number != 1 else ''}"


def gib_text(count_bytes: float) -> str:
    """A number of bytes in GiB."""
    return f"{count_bytes / GIB:,.2f} GiB"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that is closest to `word`, whatever the capitals of both; empty where none is close.

    Args:
        cutoff: least similarity, from 0 to 1 for the same word, by `difflib`.
    """
    words: dict[str, str] = {}
    for each in known:
        words.setdefault(each.lower(), each)
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=cutoff)
    return words[close[0]] if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'zero3'?"` when a known word is close to `word`, see `nearest`; else an empty string."""
    near = nearest(word, known)
    return f" Did you mean '{near}'?" if near else ""


def install(extra: str) -> str:
    """The edit for a missing package, without the full stop."""
    return f"Install the extra, in a clone of Terrazzo: pip install -e '.[{extra}]'"


def listed(things: Sequence[object], most: int = 3, mark: str = ",") -> str:
    """`"a, b, c and 5 more"`: the first `most` things, and how many are left.

    Args:
        mark: stands between two things.
    """
    shown = f"{mark} ".join(map(str, things[:most]))
    return f"{shown} and {len(things) - most} more" if len(things) > most else shown


def of_ranks(numbers: Collection[int], most: int = 8) -> str:
    """`"rank 0"`, `"ranks 0, 1"`, in order."""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(sorted(numbers), most)}"


def printable(text: str) -> str:
    """`text` with control characters escaped, except line ends."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def shortened(text: str, most: int = 60) -> str:
    """At most `most` characters of `text`; if it is longer, it ends with three dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def warn(message: str) -> None:
    """Warn, with the location where user code called into this package."""
    package, frame, level = __name__.partition(".")[0], sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
