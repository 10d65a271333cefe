"""The answer for a model on machines: one estimate, and where many were made, the others and the sizing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.messages import GIB
from terrazzo.planner.report.alternatives import alternatives
from terrazzo.planner.report.bars import Chart, chart_of
from terrazzo.planner.report.blocks import TextBlock
from terrazzo.planner.report.convert import frontier_row, report_of
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.planner.report.schema import PlanReport, RefusedRow
from terrazzo.planner.report.sizing import Sizing, sizing_report
from terrazzo.planner.setup.setup import Setup

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
            "sizing": None if self.sizing is None else sizing_report(self.sizing),
        }
        return report.model_copy(update=more)

    def blocks(self) -> list[TextBlock]:
        """The answer as people read it."""
        if self.frontier is None:
            return self.best.blocks()
        return self.frontier.blocks(self.best, () if self.sizing is None else self.sizing.blocks())

    def chart(self) -> Chart:
        """Memory by strategy, all else as in `best`."""
        return chart_of(alternatives(self.best, self.estimate), self.best)


def _refused(frontier: Frontier) -> tuple[RefusedRow, ...]:
    return tuple(
        RefusedRow.of(each, needed_gib=each.needed_bytes / GIB if each.needed_bytes else None)
        for each in frontier.refused
    )
