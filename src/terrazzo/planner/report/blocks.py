"""Lines and tables: what a report is made of before anyone knows where it is printed.

On a terminal rich draws them, elsewhere they are aligned text without colours. A table too wide for its terminal loses
columns, the least important first, and says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from terrazzo.messages import printable

__all__ = ["TableColumn", "TextBlock", "TextLine", "TextTable", "plain", "show"]

GAP = 2  # blanks between columns
SENTENCE = 30  # the least width of a column of sentences


@dataclass(frozen=True)
class TextLine:
    """One line of text, or several. `style` is rich's; only a terminal shows it. `copied`: a command, never broken."""

    text: str
    style: str = ""
    copied: bool = False


@dataclass(frozen=True)
class TableColumn:
    """`keep` says what goes last when there is no room: columns of the lowest number go first, of 1 without a word."""

    heading: str
    align: Literal["left", "right"] = "left"
    keep: int = 9


@dataclass(frozen=True)
class TextTable:
    """Rows of text under headings, the last `totals` of them set apart. `wrap`: the last column holds sentences."""

    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[str, ...], ...]
    totals: int = 0
    wrap: bool = False

    def widths(self) -> list[int]:
        cells = [[column.heading for column in self.columns], *self.rows]
        return [max(len(row[index]) for row in cells) for index in range(len(self.columns))]

    def within(self, width: int) -> tuple[TextTable, list[str]]:
        """This table without the columns that `width` characters have no room for, and the headings of those."""
        shown, widths = list(range(len(self.columns))), self.widths()
        if self.wrap:
            widths[-1] = min(widths[-1], SENTENCE)
        while sum(widths[index] + GAP for index in shown) > width and len(shown) > 1:
            shown.remove(min(shown, key=lambda index: (self.columns[index].keep, -index)))
        left_out = [
            column.heading for index, column in enumerate(self.columns) if index not in shown and column.keep > 1
        ]
        columns = tuple(self.columns[index] for index in shown)
        rows = tuple(tuple(row[index] for index in shown) for row in self.rows)
        return replace(self, columns=columns, rows=rows), left_out


TextBlock = TextLine | TextTable


def show(blocks: Sequence[TextBlock], console: Console | None = None) -> None:
    """Print a report: drawn by rich on a terminal, plain where the output goes elsewhere."""
    console = console or Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.file.write(plain(blocks))
        return
    for block in blocks:
        if isinstance(block, TextLine):
            console.print(Text(printable(block.text), block.style), soft_wrap=block.copied)
            continue
        table, left_out = block.within(console.width)
        console.print(_rich(table))
        if left_out:
            console.print(Text(f"Left out for want of room: {', '.join(left_out)}.\n", "dim"))


def plain(blocks: Sequence[TextBlock]) -> str:
    """Aligned text of any width, without a character that a terminal would obey."""
    parts = [block.text if isinstance(block, TextLine) else _aligned(block) for block in blocks]
    return printable("\n".join(parts)) + "\n"


def _aligned(table: TextTable) -> str:
    widths = table.widths()
    rows = [tuple(column.heading for column in table.columns), *table.rows]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append((" " * GAP).join(cells).rstrip())
    rule = (" " * GAP).join("-" * width for width in widths)
    lines.insert(1, rule)
    if table.totals:
        lines.insert(len(lines) - table.totals, rule)
    return "\n" + "\n".join(lines)


def _rich(table: TextTable) -> RichTable:
    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in table.columns:
        wraps = table.wrap and column is table.columns[-1]
        drawn.add_column(column.heading, justify=column.align, no_wrap=not wraps)
    for index, row in enumerate(table.rows):
        drawn.add_row(*(Text(printable(cell)) for cell in row), end_section=index == len(table.rows) - table.totals - 1)
    return drawn
