"""Seconds of a step by cause, over the course of a run, as an SVG picture in a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from terrazzo.telemetry.log.records import mean_of
from terrazzo.telemetry.log.step_record import StepParts, StepRecord
from terrazzo.telemetry.verdict.bounds import BOUNDS

__all__ = ["MARGIN", "PICTURE_STYLE", "WIDTH", "axes", "drawing", "step_picture"]

WIDTH, MARGIN = 720, 48
"""Width and margin of every picture in a page, in pixels."""

HEIGHT, MOST_BARS = 300, 120

COLORS = {name: row.color for name, row in BOUNDS.items() if row.color}
COLORS |= {"forward": "#3b7dd8", "backward": "#8f5fbf", "clip": "#c9a227", "other": "#8b8f94"}
"""Colors of causes, and of phases for records without causes."""

PICTURE_STYLE = "\n".join(f".part-{name} {{ fill: {color}; }}" for name, color in COLORS.items())


def step_picture(records: Sequence[StepRecord]) -> str:
    """A stacked bar for each record, or for the mean of several in a row; each part shows its seconds on hover."""
    field: StepParts = "cause_s" if "cause_s" in records[-1] else "phase_s"
    groups = list(_groups(records))
    bars = list(_parts(groups, field))
    names = [name for name in COLORS if any(values.get(name, 0.0) > 0 for values in bars)]
    high = max(sum(values.values()) for values in bars) or 1.0
    bottom, room = HEIGHT - MARGIN, HEIGHT - 1.5 * MARGIN
    width = (WIDTH - 2 * MARGIN) / len(bars)
    drawn = []
    for index, (group, values) in enumerate(zip(groups, bars, strict=True)):
        top = float(bottom)
        for name in names:
            tall = max(0.0, values.get(name, 0.0)) / high * room
            top -= tall
            if tall:
                hover = escape(f"{_steps(group)}: {name} {values[name]:.4f} s")
                drawn.append(
                    f'<rect class="part-{name}" x="{MARGIN + index * width:.1f}" y="{top:.1f}"'
                    f' width="{max(0.5, width - 1):.1f}" height="{tall:.2f}"><title>{hover}</title></rect>'
                )
    drawn += axes(HEIGHT, (_steps(groups[0]), _steps(groups[-1])), f"{high:.2g} s") + _legend(names)
    return drawing(HEIGHT, f"seconds of a step by {field.removesuffix('_s')}, over steps", drawn)


def drawing(height: int, label: str, drawn: Sequence[str]) -> str:
    """SVG elements as one picture of a page."""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def axes(height: int, ends: tuple[str, str], high: str) -> list[str]:
    """The horizontal axis with a label at each of its `ends`, and the label `high` at the top of the vertical one."""
    bottom = height - MARGIN
    return [
        f'<line class="axis" x1="{MARGIN}" y1="{bottom}" x2="{WIDTH - MARGIN}" y2="{bottom}"/>',
        f'<text x="{MARGIN}" y="{bottom + 16}">{escape(ends[0])}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 16}" text-anchor="end">{escape(ends[1])}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN / 2 + 4}" text-anchor="end">{high}</text>',
    ]


def _groups(records: Sequence[StepRecord]) -> Iterator[Sequence[StepRecord]]:
    size = math.ceil(len(records) / MOST_BARS)
    for start in range(0, len(records), size):
        yield records[start : start + size]


def _parts(groups: Sequence[Sequence[StepRecord]], field: StepParts) -> Iterator[dict[str, float]]:
    """The mean seconds by part of each group of records."""
    for group in groups:
        names = dict.fromkeys(name for record in group for name in record.get(field, {}))
        yield {name: mean_of(group, field, name) for name in names}


def _steps(group: Sequence[StepRecord]) -> str:
    return f"step {group[-1]['step']}"


def _legend(names: Sequence[str]) -> list[str]:
    """Names and colors below the axis, in the order in which parts are stacked."""
    drawn, x = [], float(MARGIN)
    for name in names:
        drawn.append(f'<rect class="part-{name}" x="{x:.0f}" y="{HEIGHT - 22}" width="10" height="10"/>')
        drawn.append(f'<text x="{x + 14:.0f}" y="{HEIGHT - 13}">{name.replace("_", " ")}</text>')
        x += 24 + 7 * len(name)
    return drawn
