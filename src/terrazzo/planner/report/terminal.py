"""Memory per strategy as bars of characters: coloured blocks where there are colours, letters elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from terrazzo.messages import printable
from terrazzo.planner.report.bars import KINDS, Chart, MemoryBar
from terrazzo.planner.report.words import bytes_text

__all__ = ["show_bars"]

BAR = 44  # characters, where there is room


def show_bars(chart: Chart, console: Console) -> None:
    """Print a chart. Kinds of memory are told apart by colour on a terminal that has colours, else by letters."""
    colours = console.is_terminal and console.color_system in ("256", "truecolor") and not console.no_color
    blocks = colours and "utf" in console.encoding.lower()
    label = max(len(bar.label) for bar in chart.bars)
    width = max(10, min(BAR, console.width - label - 20)) if console.is_terminal else BAR
    lines = [_line(bar, chart, label, width, blocks) for bar in chart.bars]
    for line in [_heading(chart), *lines, *_legend(chart, blocks, console.width if console.is_terminal else 120)]:
        if console.is_terminal:
            console.print(line, no_wrap=True, overflow="crop")
        else:
            console.file.write(line.plain.rstrip() + "\n")


def _heading(chart: Chart) -> Text:
    if chart.capacity is None:
        return Text("\nmemory by strategy")
    capacity = bytes_text(chart.capacity)
    shown = f"| is the device's {capacity}" if chart.capacity <= chart.limit else f"the device has {capacity}"
    return Text(f"\nmemory by strategy; {shown}")


def _line(bar: MemoryBar, chart: Chart, label: int, width: int, blocks: bool) -> Text:
    """`> zero3  wwggssssxx  |   44.3 GiB`"""
    mark = "> " if bar.chosen else "  "
    line = Text().append(f"{mark}{printable(bar.label):<{label}}  ", "bold" if bar.chosen else "")
    cells = _cells(bar, chart.limit, width, blocks)
    if chart.capacity is not None and chart.capacity <= chart.limit:
        cells.insert(min(len(cells), round(chart.capacity / chart.limit * width)), ("|", "red"))
    for character, style in cells:
        line.append(character, style)
    too_long = chart.capacity is not None and bar.total > chart.capacity
    amount = f"{chart.unit.of(bar.total, 1):>9} {chart.unit.name}"
    return line.append(f" {amount}", "red" if too_long else "bold" if bar.chosen else "")


def _cells(bar: MemoryBar, limit: float, width: int, blocks: bool) -> list[tuple[str, str]]:
    """A character and a style for each column; a bar that is cut ends with `>`."""
    kinds = {kind.name: kind for kind in KINDS}
    cells: list[tuple[str, str]] = []
    end = 0.0
    for name, value in bar.parts.items():
        end += value
        kind = kinds[name]
        count = min(width, round(end / limit * width)) - len(cells)
        cells += [("█" if blocks else kind.letter, kind.colour if blocks else "")] * max(0, count)
    if bar.total > limit:
        cells[-1] = (">", "")
    return cells + [(" ", "")] * (width - len(cells))


def _legend(chart: Chart, blocks: bool, width: int) -> list[Text]:
    lines = [Text()]
    for kind in chart.kinds:
        entry = Text().append("█" if blocks else kind.letter, kind.colour if blocks else "").append(f" {kind.name}   ")
        if lines[-1].cell_len + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append_text(entry)
    return lines
