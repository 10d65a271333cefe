"""How `python -m` of an integration runs a script, and how an error of Terrazzo ends it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from terrazzo.errors import TerrazzoError

__all__ = ["run_and_exit"]


def run_and_exit(main: Callable[[list[str]], int | None], arguments: Sequence[str]) -> NoReturn:
    """End this process with what `main` returns, or with the exit code of the error that it raises.

    Of an error that `says_all` the message is shown alone; of any other the traceback, which says where it came from.
    """
    try:
        code = main(list(arguments))
    except TerrazzoError as error:
        shown = [f"{type(error).__name__}: {error}"] if error.says_all else traceback.format_exception(error)
        print("".join(shown).rstrip(), file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
