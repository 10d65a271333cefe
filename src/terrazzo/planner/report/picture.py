"""Memory per strategy as stacked bars, and the step of a pipeline below: SVG written here, PNG drawn by Pillow, from
one layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw, ImageFont

from terrazzo.errors import BadInput
from terrazzo.parallel.pipeline.schedules import ActionKind
from terrazzo.planner.report.bars import KINDS, PICTURE_SUFFIXES, Chart, MemoryBar
from terrazzo.planner.report.words import ByteUnit, bytes_text
from terrazzo.planner.timing.timeline import Span, Timeline

__all__ = ["png", "save_picture", "svg"]

WIDTH, MARGIN, BAR, GAP, ROOM = 1000, 28, 26, 14, 190
INK, GREY, GRID, PAPER, LIMIT = "#23262b", "#6d6f76", "#e4e6ea", "#ffffff", "#c0392b"
TITLE, TEXT, SMALL = 21, 14, 12
FORWARD, BACKWARD, WEIGHT, ROW = "#4a86c5", "#dd8a2e", "#5b9a68", 22
PASSES = {
    ActionKind.FORWARD: (FORWARD, "forward"),
    ActionKind.BACKWARD: (BACKWARD, "backward"),
    ActionKind.WEIGHT: (WEIGHT, "weights' gradients"),
}
SCALE = 2
"""Pixels of a PNG for each unit of the layout."""


@dataclass(frozen=True)
class DrawnBox:
    x: float
    y: float
    width: float
    height: float
    fill: str
    hint: str = ""


@dataclass(frozen=True)
class Stroke:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1
    dashed: bool = False


@dataclass(frozen=True)
class DrawnText:
    x: float
    y: float
    text: str
    size: int
    colour: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = DrawnBox | Stroke | DrawnText


def save_picture(chart: Chart, path: Path) -> None:
    """Write a chart in the format that the file's name ends with. Raises: `BadInput` where it ends otherwise."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise BadInput(f"A picture's name must end with {' or '.join(PICTURE_SUFFIXES)}: '{path}' does not.")
    if path.suffix.lower() == ".svg":
        path.write_text(svg(chart), encoding="utf-8")
    else:
        png(chart).save(path, dpi=(96 * SCALE, 96 * SCALE))


def svg(chart: Chart) -> str:
    """The chart as an SVG document; segments tell their size when pointed at."""
    shapes, height = _layout(chart)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label={quoteattr(chart.title)} font-family="Helvetica, Arial, sans-serif">'
    )
    background = f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>'
    return "\n".join([head, background, *map(_svg_shape, shapes), "</svg>", ""])


def png(chart: Chart) -> Image.Image:
    """The chart as an image, in twice the layout's resolution."""
    shapes, height = _layout(chart)
    image = Image.new("RGB", (WIDTH * SCALE, round(height * SCALE)), PAPER)
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        _draw(draw, shape)
    return image


# -- the layout ------------------------------------------------------------------------------------------------------


def _layout(chart: Chart) -> tuple[list[Shape], float]:
    """All shapes, and the height of the picture."""
    shapes: list[Shape] = [
        DrawnText(MARGIN, MARGIN + TITLE * 0.8, chart.title, TITLE, bold=True),
        DrawnText(MARGIN, MARGIN + TITLE + 22, _shortened(chart.subtitle, WIDTH - 2 * MARGIN, TEXT), TEXT, GREY),
    ]
    legend, top = _legend(chart, MARGIN + TITLE + 50)
    shapes += legend
    top += 44
    left = MARGIN + max(_text_width(bar.label, TEXT, bar.chosen) for bar in chart.bars) + 14
    right = WIDTH - MARGIN - ROOM
    bottom = top + len(chart.bars) * (BAR + GAP)
    axis = _Axis(left, (right - left) / chart.limit, chart.limit, chart.unit)
    shapes += _grid(axis, top - 6, bottom)
    tops = [top + index * (BAR + GAP) for index in range(len(chart.bars))]
    for bar, y in zip(chart.bars, tops, strict=True):
        shapes += _bar(bar, axis, y)
    if chart.capacity is not None:
        shapes += _capacity(chart.capacity, axis, top, bottom)
    for bar, y in zip(chart.bars, tops, strict=True):
        shapes += _labels(bar, axis, y, chart.capacity)
    shapes.append(DrawnText((left + right) / 2, bottom + 40, chart.measures, SMALL, GREY, "middle"))
    bottom += 40 + MARGIN
    if chart.pipeline is not None:
        below, bottom = _pipeline(chart.pipeline, bottom)
        shapes += below
    return shapes, bottom


def _pipeline(step: Timeline, top: float) -> tuple[list[Shape], float]:
    """A row for each rank along pp, on which passes of micro-batches lie where they run; and where it ends."""
    ranks = range(len(step.ranks))
    left = MARGIN + _text_width(f"pp rank {len(ranks) - 1}", TEXT) + 14
    scale = (WIDTH - MARGIN - left - 90) / step.seconds
    idle = sum(map(step.idle_share, ranks)) / len(ranks)
    count = 1 + max(span.action.micro_batch for span in step.ranks[0])
    title = f"A step of {count} micro-batches: {idle:.0%} of it idle"
    shapes: list[Shape] = [DrawnText(MARGIN, top + TITLE, title, TITLE - 4, bold=True), *_passes(step, top + 40)]
    top += 70
    for rank, spans in enumerate(step.ranks):
        y = top + rank * (ROW + 4)
        shapes += [
            DrawnText(left - 12, y + ROW - 6, f"pp rank {rank}", TEXT, anchor="end"),
            DrawnBox(left, y, step.seconds * scale, ROW, GRID),
            DrawnText(left + step.seconds * scale + 10, y + ROW - 6, f"{step.idle_share(rank):.0%} idle", SMALL, GREY),
        ]
        for span in spans:
            shapes += _span(span, left, y, scale, _text_width(str(count - 1), SMALL) + 4)
    bottom = top + len(ranks) * (ROW + 4)
    shapes.append(
        DrawnText(left + step.seconds * scale / 2, bottom + 18, f"{step.seconds:.3g} s", SMALL, GREY, "middle")
    )
    return shapes, bottom + 18 + MARGIN


def _passes(step: Timeline, y: float) -> Iterator[Shape]:
    """A swatch for each kind of pass that the step has, and what no pass is."""
    x: float = MARGIN
    for kind in dict.fromkeys(span.action.kind for span in step.ranks[0]):
        colour, name = PASSES[kind]
        yield DrawnBox(x, y, 13, 13, colour)
        yield DrawnText(x + 20, y + 11, name, SMALL)
        x += 20 + _text_width(name, SMALL) * 1.08 + 22
    yield DrawnText(x, y + 11, "of a micro-batch; sums over ranks and the update follow", SMALL, GREY)


def _span(span: Span, left: float, y: float, scale: float, room: float) -> Iterator[Shape]:
    """One pass of one micro-batch, with its number where all numbers have room."""
    (colour, way), number = PASSES[span.action.kind], str(span.action.micro_batch)
    x, width = left + span.start_s * scale, (span.end_s - span.start_s) * scale
    hint = f"{way} of micro-batch {number} through stage {span.action.stage}: {span.end_s - span.start_s:.3g} s"
    yield DrawnBox(x, y, max(width - min(1.0, width / 4), 0), ROW, colour, hint)
    if width > room:
        yield DrawnText(x + width / 2, y + ROW - 7, number, SMALL, PAPER, "middle")


@dataclass(frozen=True)
class _Axis:
    """Where an amount of bytes lies. `scale`: units of the layout for each byte."""

    left: float
    scale: float
    limit: float
    unit: ByteUnit

    def x(self, value: float) -> float:
        return self.left + min(value, self.limit) * self.scale


def _legend(chart: Chart, y: float) -> tuple[list[Shape], float]:
    """A swatch for each kind, in as many lines as they need, and where the last line ends."""
    shapes: list[Shape] = []
    x: float = MARGIN
    for kind in chart.kinds:
        width = 20 + _text_width(kind.name, SMALL) * 1.08 + 22
        if x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + 22
        shapes += [DrawnBox(x, y, 13, 13, kind.colour), DrawnText(x + 20, y + 11, kind.name, SMALL)]
        x += width
    if any(bar.upper for bar in chart.bars):
        x, y = (x, y) if x + 150 < WIDTH - MARGIN else (MARGIN, y + 22)
        shapes += [*_whisker(x, x + 22, y + 6.5), DrawnText(x + 30, y + 11, "at most", SMALL)]
    return shapes, y + 13


def _grid(axis: _Axis, top: float, bottom: float) -> Iterator[Shape]:
    step = _step(axis.limit / axis.unit.size / 8)
    last = int(axis.limit / axis.unit.size / step)
    for index in range(last + 1):
        x = axis.x(index * step * axis.unit.size)
        yield Stroke(x, top, x, bottom, GRID)
        unit = f" {axis.unit.name}" if index == last else ""
        yield DrawnText(x, bottom + 18, f"{index * step:,g}{unit}", SMALL, GREY, "middle")


def _step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... from `rough` on."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _bar(bar: MemoryBar, axis: _Axis, y: float) -> Iterator[Shape]:
    colours = {kind.name: kind.colour for kind in KINDS}
    start = 0.0
    for name, value in bar.parts.items():
        x = axis.x(start)
        width = axis.x(start + value) - x
        if width > 0:
            yield DrawnBox(x, y, width, BAR, colours[name], f"{name}: {axis.unit.of(value)} {axis.unit.name}")
        start += value
    if bar.total > axis.limit:
        yield from _torn(axis.x(bar.total), y)
    elif bar.upper is not None and bar.upper > bar.total:
        yield from _whisker(axis.x(bar.total), axis.x(bar.upper), y + BAR / 2)


def _whisker(x1: float, x2: float, y: float) -> Iterator[Shape]:
    yield Stroke(x1, y, x2, y, GREY, 1.5)
    yield Stroke(x2, y - 6, x2, y + 6, GREY, 1.5)


def _labels(bar: MemoryBar, axis: _Axis, y: float, capacity: float | None) -> Iterator[Shape]:
    """What the bar is called, and how long it is, on paper that covers the lines behind it; red is too long."""
    room = math.inf if capacity is None else capacity
    middle, amount = y + BAR / 2 + TEXT * 0.36, f"{axis.unit.of(bar.total, 1)} {axis.unit.name}"
    width = _text_width(amount, TEXT) * (1.25 if bar.chosen else 1.1)
    upper = "" if bar.upper is None or bar.total > axis.limit else f"at most {axis.unit.of(bar.upper, 1)}"
    x = axis.x(max(bar.total, bar.upper or 0)) + 10
    yield DrawnText(axis.left - 12, middle, bar.label, TEXT, INK, "end", bold=bar.chosen)
    yield DrawnBox(x - 5, y, width + 10 + _text_width(upper, SMALL) * 1.1, BAR, PAPER)
    yield DrawnText(x, middle, amount, TEXT, LIMIT if bar.total > room else INK, bold=bar.chosen)
    yield DrawnText(x + width + 5, middle, upper, SMALL, LIMIT if (bar.upper or 0) > room else GREY)


def _torn(x: float, y: float) -> Iterator[Shape]:
    """Two white cuts: the bar goes on."""
    for offset in (14, 22):
        yield Stroke(x - offset, y + BAR + 1, x - offset + 8, y - 1, PAPER, 3)


def _capacity(capacity: float, axis: _Axis, top: float, bottom: float) -> Iterator[Shape]:
    if capacity > axis.limit:
        yield DrawnText(axis.x(axis.limit), top - 16, f"the device has {bytes_text(capacity)}", SMALL, LIMIT, "end")
        return
    x = axis.x(capacity)
    yield Stroke(x, top - 10, x, bottom, LIMIT, 2, dashed=True)
    yield DrawnText(x, top - 16, f"memory of the device: {bytes_text(capacity)}", SMALL, LIMIT, "middle")


# -- text ------------------------------------------------------------------------------------------------------------


@cache
def _font(pixels: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(pixels)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise BadInput("Pictures need a Pillow with FreeType, and the one here was built without: pip install pillow.")
    return font


def _text_width(text: str, size: int, bold: bool = False) -> float:
    return _font(size).getlength(_drawable(text)) * (1.06 if bold else 1.0)


def _shortened(text: str, width: float, size: int) -> str:
    while _text_width(text, size) > width:
        text = text[:-4].rstrip() + "..."
    return text


def _drawable(text: str) -> str:
    """Pillow's own font has no other signs."""
    return text.replace("×", "x").replace("·", "|").encode("latin-1", "replace").decode("latin-1")


# -- the two formats -------------------------------------------------------------------------------------------------


def _svg_shape(shape: Shape) -> str:
    if isinstance(shape, DrawnBox):
        hint = f"<title>{escape(shape.hint)}</title>" if shape.hint else ""
        size = f'width="{shape.width:.2f}" height="{shape.height:g}"'
        return f'<rect x="{shape.x:.2f}" y="{shape.y:g}" {size} fill="{shape.fill}">{hint}</rect>'
    if isinstance(shape, Stroke):
        dashes = ' stroke-dasharray="6 4"' if shape.dashed else ""
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:g}" x2="{shape.x2:.2f}" y2="{shape.y2:g}"'
        return f'<line {ends} stroke="{shape.colour}" stroke-width="{shape.width:g}"{dashes}/>'
    weight = ' font-weight="bold"' if shape.bold else ""
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
    return f'<text {place} fill="{shape.colour}"{weight}>{escape(shape.text)}</text>'


def _draw(draw: ImageDraw.ImageDraw, shape: Shape) -> None:
    if isinstance(shape, DrawnBox):
        corners = (shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
        x1, y1, x2, y2 = (round(value * SCALE) for value in corners)
        if x2 > x1:
            draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=shape.fill)
    elif isinstance(shape, Stroke):
        for ends in _dashes(shape):
            draw.line([value * SCALE for value in ends], shape.colour, round(shape.width * SCALE))
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        place, stroke = (shape.x * SCALE, shape.y * SCALE), 0.25 * SCALE * shape.bold
        font = _font(shape.size * SCALE)
        draw.text(place, _drawable(shape.text), shape.colour, font, anchor, stroke_width=stroke)


def _dashes(stroke: Stroke) -> Iterator[tuple[float, float, float, float]]:
    """The stroke, or its dashes of 6 with 4 between; dashed ones are vertical."""
    if not stroke.dashed:
        yield stroke.x1, stroke.y1, stroke.x2, stroke.y2
        return
    y = stroke.y1
    while y < stroke.y2:
        yield stroke.x1, y, stroke.x2, min(y + 6, stroke.y2)
        y += 10
