"""The error tree.

    TerrazzoError
    ├── BadInput     a plan, config, model or data set that cannot work: fix the input   (CLI exit code 2)
    ├── Misuse       a correct object used at the wrong moment: fix the calling code     (CLI exit code 1)
    └── Diverged     the numbers left the range that training can recover from           (CLI exit code 1)

Every message is one paragraph that names the value found, what was expected, and the edit that fixes it.
Assertions are reserved for bugs in Terrazzo itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BadInput", "Diverged", "Misuse", "TerrazzoError", "did_you_mean"]


class TerrazzoError(Exception):
    """Base of every error that Terrazzo raises on purpose."""


class BadInput(TerrazzoError, ValueError):
    """The plan, configuration, model or data cannot work; nothing has been started or changed."""


class Misuse(TerrazzoError, RuntimeError):
    """A valid object was used at a moment when it cannot answer, such as reading a sharded parameter."""


class Diverged(TerrazzoError, ArithmeticError):
    """A loss or gradient became non-finite and no policy allows training to go on."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'zero3'?"` when a known word is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
