"""`report.html`: a run's curves, what was promised of it beside what was measured, and what its model writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from terrazzo.telemetry.sinks import Sink

__all__ = ["ReportPage", "page_of"]

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 720, 280, 48
MOST_POINTS = 1000
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { padding: .8rem; overflow-x: auto; border: 1px solid #8884; border-radius: 4px; font-size: 13px; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.axis { stroke: #8886; } polyline { fill: none; stroke-width: 2; }
polyline.train { stroke: #3b7dd8; } polyline.validation { stroke: #d9730d; }
text.train { fill: #3b7dd8; } text.validation { fill: #d9730d; }
"""


class ReportPage(Sink):
    """Written when the run ends, however it does, from `metrics.jsonl`, so that a resumed run has all of it.

    Args:
        path: of the page.
        metrics: path of `metrics.jsonl`.
        title: of the page.
        details: text by heading.
        summary: lines of the values of kind `summary`.
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

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if kind == "summary":
            self._details = {"Promised and measured": "\n".join(self._summary(values)), **self._details}

    def _close(self) -> None:
        lines = [json.loads(line) for line in self._metrics.read_bytes().splitlines()]
        self.path.write_text(page_of(self._title, lines, self._details), encoding="utf-8")


def page_of(title: str, lines: Sequence[Mapping[str, Any]], details: Mapping[str, str]) -> str:
    """The page of a run, of the lines of its `metrics.jsonl`; it needs no other file."""
    curves = {kind: _points(lines, kind) for kind in ("train", "validation")}
    samples = [line for line in lines if line["kind"] == "sample"]
    parts = [f"<h2>Loss</h2>\n{_chart(curves)}"] if any(curves.values()) else []
    if samples:
        parts.append(_section(f"Sample at step {samples[-1]['step']}", str(samples[-1]["text"])))
    parts += [_section(heading, text) for heading, text in details.items()]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _section(heading: str, text: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n<pre>{escape(text)}</pre>"


def _points(lines: Sequence[Mapping[str, Any]], kind: str) -> list[Point]:
    """Step and loss; of many, every so many-th and the last."""
    found = [(float(line["step"]), float(line["loss"])) for line in lines if line["kind"] == kind and "loss" in line]
    found = [point for point in found if math.isfinite(point[1])]
    kept = found[:: max(1, math.ceil(len(found) / MOST_POINTS))]
    return kept if not found or kept[-1] == found[-1] else [*kept, found[-1]]


def _chart(curves: Mapping[str, Sequence[Point]]) -> str:
    """Both curves over steps, with the ends of both axes named."""
    points = [point for curve in curves.values() for point in curve]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(point: Point) -> str:
        x = MARGIN + (point[0] - left) / ((right - left) or 1) * (WIDTH - 2 * MARGIN)
        y = MARGIN / 2 + (high - point[1]) / ((high - low) or 1) * (HEIGHT - 1.5 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    bottom = HEIGHT - MARGIN
    drawn = [
        f'<line class="axis" x1="{MARGIN}" y1="{bottom}" x2="{WIDTH - MARGIN}" y2="{bottom}"/>',
        f'<text x="{MARGIN}" y="{bottom + 18}">step {left:g}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 18}" text-anchor="end">{right:g}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN / 2 + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{MARGIN - 6}" y="{bottom + 4}" text-anchor="end">{low:.2f}</text>',
    ]
    for row, (kind, curve) in enumerate(curves.items()):
        if curve:
            way = " ".join(map(place, curve))
            drawn.append(f'<polyline class="{kind}" points="{way}"/>')
            said = f"{kind}: {curve[-1][1]:.4f}"
            at = f'x="{WIDTH - MARGIN}" y="{24 + 18 * row}" text-anchor="end"'
            drawn.append(f'<text class="{kind}" {at}>{said}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss over steps">{"".join(drawn)}</svg>'
