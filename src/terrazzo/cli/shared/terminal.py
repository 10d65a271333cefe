"""Printing lines, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from terrazzo.messages import printable

__all__ = ["columns", "say", "say_json", "unmistakable"]


def say(text: str, style: str = "", *, stderr: bool = False) -> None:
    """Print lines, with control characters escaped."""
    Console(highlight=False, soft_wrap=True, stderr=stderr).print(Text(printable(text), style))


def say_json(value: Any) -> None:
    """Print plain values as JSON."""
    print(json.dumps(value, indent=2))


def unmistakable(text: object) -> str:
    """`printable`, with all characters but ASCII escaped: of others some look alike."""
    shown = str(text)
    return shown if shown.isascii() and shown.isprintable() else ascii(shown)[1:-1]


def columns(rows: Sequence[Sequence[str]], align: str = "", cell: Callable[[str], str] = unmistakable) -> str:
    """Rows of cells as aligned lines.

    Args:
        align: `<` or `>` for each column; default: all `<`.
        cell: makes the text that is shown of a cell.
    """
    cells = [[cell(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = align or "<" * len(widths)
    lines = ("  ".join(f"{each:{side}{width}}" for each, side, width in zip(row, sides, widths, strict=True))
             for row in cells)  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)
