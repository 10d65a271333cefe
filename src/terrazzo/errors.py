"""The error tree, and what messages are made of.

    TerrazzoError
    ├── BadInput     a plan, config, model or data set that cannot work: fix the input
    │   └── Damaged  a checkpoint that is not what was written: use an older one
    ├── Misuse       a correct object used at the wrong moment: fix the calling code
    │   └── RanksApart  ranks that came to one exchange with different things
    ├── SaveFailed   a checkpoint could not be written; earlier ones are intact
    │   └── FolderLost  the folder of a run was moved away under it
    ├── SwapFailed   a state in a swap file cannot be had any more; checkpoints are
    │   └── SwapChanged  it holds other bytes than were written
    ├── Diverged     the numbers left the range that training can recover from
    │   └── CopiesDiffer  of one state, on ranks that should hold the same
    └── Corrupted    a processor, memory or a drive is at fault: SwapChanged, CopiesDiffer, and more

Every message is one paragraph that names the value found, what was expected, and the edit that fixes it.
Assertions are reserved for bugs in Terrazzo itself.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence

from terrazzo.exit_codes import BAD_INPUT, CORRUPTED, DIVERGED, FAILED

__all__ = [
    "ALL",
    "BY_NAME",
    "BadInput",
    "CopiesDiffer",
    "Corrupted",
    "Damaged",
    "Diverged",
    "FolderLost",
    "Misuse",
    "RanksApart",
    "SaveFailed",
    "SwapChanged",
    "SwapFailed",
    "TerrazzoError",
    "counted",
    "did_you_mean",
    "install",
    "listed",
    "nearest",
    "printable",
    "shortened",
    "warn",
]


ALL = "?"
"""Given in place of a name from a table, it is refused with a list of all names."""


class TerrazzoError(Exception):
    """Base of every error that Terrazzo raises on purpose.

    Attributes:
        exit_code: the exit code of a run that it ends.
        says_all: whether the message is enough, so that no traceback is shown.
        lasts: whether a run that is started again would end in the same way.
    """

    exit_code = FAILED
    says_all = False
    lasts = False


class BadInput(TerrazzoError, ValueError):
    """The plan, configuration, model or data cannot work; nothing has been started or changed."""

    exit_code = BAD_INPUT
    says_all = lasts = True


class Damaged(BadInput):
    """A checkpoint's bytes are not those that were written, or some are missing; nothing has been changed."""


class Misuse(TerrazzoError, RuntimeError):
    """A valid object was used at a moment when it cannot answer, such as reading a sharded parameter."""

    lasts = True


class RanksApart(Misuse):
    """Ranks have not run the same, and what they exchange does not belong together; no step uses it."""


class SaveFailed(TerrazzoError, RuntimeError):
    """A checkpoint could not be written completely; it is not visible, and earlier ones are intact."""

    says_all = True


class FolderLost(SaveFailed):
    """The folder that a run writes to was renamed, removed or replaced; nothing more is written there."""

    lasts = True


class SwapFailed(TerrazzoError, RuntimeError):
    """A state could not be written to a swap file, or read back as it was; checkpoints are intact."""

    says_all = True


class Diverged(TerrazzoError, ArithmeticError):
    """A loss or gradient became non-finite and no policy allows training to go on."""

    exit_code = DIVERGED
    says_all = lasts = True


class Corrupted(TerrazzoError):
    """A rank computes wrongly, or memory or a drive has changed what was written; earlier checkpoints are intact."""

    exit_code = CORRUPTED
    lasts = True


class CopiesDiffer(Diverged, Corrupted):
    """Ranks that should hold the same state do not; the message names those that are not as most are."""

    exit_code = CORRUPTED


class SwapChanged(SwapFailed, Corrupted):
    """A swap file holds other bytes than were written, by `offload.digest`."""


BY_NAME: dict[str, type[TerrazzoError]] = {
    name: each for name, each in globals().items() if isinstance(each, type) and issubclass(each, TerrazzoError)
}
"""The classes of the error tree by name, for errors that other ranks report."""


def counted(number: int, noun: str) -> str:
    """`"no ranks"`, `"1 rank"`, `"2 ranks"`."""
    return f"{number or 'no'} {noun}{'s' if number != 1 else ''}"


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
