"""The answer for a model on machines: one estimate, and where many were made, the others and the sizing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.files import GIB
from terrazzo.planner.choice.frontier import NO_MESH, SHOWN_ROWS, Frontier
from terrazzo.planner.choice.sizing import Sizing
from terrazzo.planner.estimates import Estimate
from terrazzo.planner.report.alternatives import alternatives
from terrazzo.planner.report.bars import Chart, chart_of
from terrazzo.planner.report.convert import frontier_row, report_of
from terrazzo.planner.report.schema import PlanReport, RefusedRow, SizingReport, SizingRow
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.text.blocks import TableColumn, TextBlock, TextLine, TextTable

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """`best` is of the setup that was named, the best of a search, or what comes nearest where nothing fits."""

    best: Estimate
    estimate: Callable[[Setup], Estimate]
    frontier: Frontier | None = None
    sizing: Sizing | None = None

    def report(self) -> PlanReport:
        """The answer as `--json` prints it."""
        report = report_of(self.best)
        if self.frontier is None:
            return report
        more = {
            "considered": self.frontier.considered,
            "frontier": tuple(frontier_row(each) for each in self.frontier.leaders),
            "refused": _refused(self.frontier),
            "sizing": None if self.sizing is None else _sizing(self.sizing),
        }
        return report.model_copy(update=more)

    def blocks(self) -> list[TextBlock]:
        """The answer as people read it."""
        if self.frontier is None:
            return self.best.blocks()
        head = () if self.sizing is None else (TextLine(str(self.sizing), "bold"), _sizing_table(self.sizing))
        return self.frontier.blocks(self.best, head)

    def chart(self) -> Chart:
        """Memory by strategy, all else as in `best`."""
        return chart_of(alternatives(self.best, self.estimate), self.best)


def _refused(frontier: Frontier) -> tuple[RefusedRow, ...]:
    return tuple(
        RefusedRow.of(each, needed_gib=each.needed_bytes / GIB if each.needed_bytes else None)
        for each in frontier.refused
    )


def _sizing(sizing: Sizing) -> SizingReport:
    return SizingReport.of(
        sizing,
        states_floor_gpus=sizing.floor,
        states_gb=sizing.state_bytes / 1e9,
        expected_gpus=sizing.expected,
        rows=tuple(_sizing_row(step) for step in sizing.steps),
    )


def _sizing_row(step: Frontier) -> SizingRow:
    best = step.best
    nearest = min(step.refused, key=lambda each: each.overrun, default=None)
    return SizingRow(
        gpus=step.request.gpus,
        fits=best is not None,
        fits_surely=best is not None and bool(best.memory.fits_surely),
        strategy=best.setup.plan.name if best else None,
        device_gib=best.memory.expected_bytes / GIB if best else None,
        upper_gib=best.memory.most_bytes / GIB if best else None,
        tokens_per_s_per_gpu=best.time.tokens_per_s_per_gpu if best and best.time else None,
        reason="" if best else NO_MESH if nearest is None else nearest.reason,
    )


def _sizing_table(sizing: Sizing) -> TextTable:
    columns = (
        TableColumn("machines" if sizing.machines else "GPUs", "right"),
        TableColumn("runs"),
        TableColumn("strategy", keep=8),
        TableColumn("GiB expected", "right", 8),
        TableColumn("at most", "right", 5),
        TableColumn("tok/s/GPU", "right", 6),
        TableColumn("why not"),
    )
    rows = []
    for row in map(_sizing_row, sizing.steps[-SHOWN_ROWS:]):
        runs = "yes" if row.fits_surely else "with little room" if row.fits else "no"
        amounts = [row.device_gib, row.upper_gib]
        cells = ["" if value is None else f"{value:,.1f}" for value in amounts]
        speed = "" if row.tokens_per_s_per_gpu is None else f"{row.tokens_per_s_per_gpu:,.0f}"
        rows.append((f"{row.gpus:,}", runs, row.strategy or "", *cells, speed, row.reason))
    return TextTable(columns, tuple(rows), wrap=True)
