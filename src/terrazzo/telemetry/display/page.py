"""`report.html`: loss curves, where the time went, what was promised and measured, and a sample of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from terrazzo.files import replace_file
from terrazzo.telemetry.display.picture import MARGIN, PICTURE_STYLE, WIDTH, axes, drawing, step_picture
from terrazzo.telemetry.display.tables import Table, tables_of
from terrazzo.telemetry.log.records import all_steps_of, lines_of, restart_text, steps_of
from terrazzo.telemetry.log.sinks import Sink

__all__ = ["VERDICT", "ReportPage", "page_of"]

VERDICT = "What bounds the step"
"""Heading of the detail that comes first, together with the picture of steps."""

Point = tuple[float, float]

HEIGHT, MOST_POINTS = 280, 1000
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { border: 1px solid #8884; border-radius: 4px; font-size: 13px; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.axis { stroke: #8886; } polyline { fill: none; stroke-width: 2; }
polyline.train { stroke: #3b7dd8; } polyline.validation { stroke: #d9730d; }
text.train { fill: #3b7dd8; } text.validation { fill: #d9730d; }
polyline.against { stroke: #8b8f94; } text.against { fill: #8b8f94; }
table { border-collapse: collapse; margin: .6rem 0; font-size: 13px; }
caption { text-align: left; font-weight: 600; white-space: nowrap; }
td, th { padding: .1rem .8rem .1rem 0; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } th { font-weight: 500; }
"""


class ReportPage(Sink):
    """Writes the page when the run ends, also if it fails, from `metrics.jsonl`, which has resumed runs as a whole.

    Args:
        path: of the page.
        metrics: path of `metrics.jsonl`.
        title: of the page.
        details: text by heading.
        summary: makes lines of the values of a line of kind `summary`.
    """

    def __init__(
        self,
        path: Path,
        metrics: Path,
        title: str,
        details: Mapping[str, str],
        summary: Callable[[Mapping[str, Any]], Sequence[str]],
    ) -> None:
        self.path = path
        self._metrics, self._title, self._details, self._summary = metrics, title, dict(details), summary

    def _log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "summary":
            self._details = {"Promised and measured": "\n".join(self._summary(values)), **self._details}
        if kind == "verdict":
            self._details = {VERDICT: str(values["sentence"]), **self._details}

    def _close(self) -> None:
        lines = lines_of(self._metrics)
        replace_file(self.path, page_of(self._title, lines, self._details), sync=False)


def page_of(
    title: str,
    lines: Sequence[Mapping[str, Any]],
    details: Mapping[str, str],
    against: Sequence[Mapping[str, Any]] = (),
    tables: Sequence[Table] = (),
) -> str:
    """The page of a run as HTML that needs no other file.

    Args:
        title: of the page.
        lines: of the run's `metrics.jsonl`.
        details: text by heading.
        against: lines of another run, whose loss is drawn as well.
        tables: to be shown after those made of the records.
    """
    curves = {kind: _points(lines, kind) for kind in ("train", "validation")}
    if against:
        curves["against"] = _points(against, "train")
    samples = [line for line in lines if line["kind"] == "sample"]
    restarts = [f"step {line['step']}: {restart_text(line)}" for line in lines if line["kind"] == "restart"]
    parts = [f"<h2>Loss</h2>\n{_chart(curves)}"] if any(curves.values()) else []
    if records := steps_of(lines):
        parts.append(
            f"<h2>{VERDICT}</h2>\n<p>{escape(details.get(VERDICT, ''))}</p>\n{step_picture(all_steps_of(lines))}"
        )
        parts += [_table(table) for table in (*tables_of(records), *tables)]
    if restarts:
        parts.append(_section("Started again", "\n".join(restarts)))
    if samples:
        parts.append(_section(f"Sample at step {samples[-1]['step']}", str(samples[-1]["text"])))
    parts += [_section(heading, text) for heading, text in details.items() if heading != VERDICT]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}{PICTURE_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>{rows}</table>"


def _section(heading: str, text: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n<pre>{escape(text)}</pre>"


def _points(lines: Sequence[Mapping[str, Any]], kind: str) -> list[Point]:
    """Step and finite loss of lines of a kind: at most some `MOST_POINTS`, evenly thinned, the last one always."""
    points = [(float(line["step"]), float(line["loss"])) for line in lines if line["kind"] == kind and "loss" in line]
    points = [point for point in points if math.isfinite(point[1])]
    thinned = points[:: max(1, math.ceil(len(points) / MOST_POINTS))]
    return thinned if not points or thinned[-1] == points[-1] else [*thinned, points[-1]]


def _chart(curves: Mapping[str, Sequence[Point]]) -> str:
    """All curves over steps, with the values at both ends of each axis."""
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(point: Point) -> str:
        x = MARGIN + (point[0] - left) / ((right - left) or 1) * (WIDTH - 2 * MARGIN)
        y = MARGIN / 2 + (high - point[1]) / ((high - low) or 1) * (HEIGHT - 1.5 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    drawn = axes(HEIGHT, (f"step {left:g}", f"{right:g}"), f"{high:.2f}")
    drawn.append(f'<text x="{MARGIN - 6}" y="{HEIGHT - MARGIN + 4}" text-anchor="end">{low:.2f}</text>')
    for row, (kind, curve) in enumerate(curves.items()):
        if curve:
            way = " ".join(map(place, curve))
            drawn.append(f'<polyline class="{kind}" points="{way}"/>')
            label = f"{kind}: {curve[-1][1]:.4f}"
            at = f'x="{WIDTH - MARGIN}" y="{24 + 18 * row}" text-anchor="end"'
            drawn.append(f'<text class="{kind}" {at}>{label}</text>')
    return drawing(HEIGHT, "loss over steps", drawn)
