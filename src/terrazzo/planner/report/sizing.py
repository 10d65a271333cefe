"""The answer to "how many GPUs": what was found on each number of devices that was tried."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.messages import GIB
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.report.blocks import TableColumn, TextBlock, TextLine, TextTable
from terrazzo.planner.report.frontier import NO_MESH, SHOWN_ROWS, Frontier
from terrazzo.planner.report.schema import SizingReport, SizingRow

__all__ = ["Sizing", "sizing_report", "sizing_row"]


@dataclass(frozen=True)
class Sizing:
    """The answer to "how many GPUs".

    Attributes:
        floor: devices that hold the model states alone; state_bytes: all of them together.
        steps: what was found on each number of devices that was tried, in order.
        gpus: the fewest found on which a setup surely fits; None where none of those tried does.
        expected: the fewest of those tried on which one is expected to fit.
        parallel: the fewest with tensor, pipeline and context parallelism beside, where that was asked; None otherwise.
    """

    floor: int
    state_bytes: float
    steps: tuple[Frontier, ...]
    gpus: int | None
    expected: int | None
    parallel: int | None = None

    @property
    def answer(self) -> Frontier | None:
        """What was found on `gpus` devices."""
        return next((step for step in self.steps if step.request.gpus == self.gpus), None)

    @property
    def possible(self) -> tuple[Frontier, ...]:
        """Those of `steps` on whose number of devices something was planned, whether it fits or not."""
        return tuple(step for step in self.steps if step.is_possible)

    @property
    def machines(self) -> bool:
        """Whether what is counted is hosts without GPUs, each as the one that is asked on."""
        device = self.steps[0].request.gpu if self.steps else None
        return isinstance(device, Device) and device.kind == "cpu"

    def __str__(self) -> str:
        return self._of_machines() if self.machines and self.gpus != 1 else self._of_gpus()

    def blocks(self) -> list[TextBlock]:
        """The answer in a sentence, and a row for each number of devices."""
        return [TextLine(str(self), "bold"), _table(self)]

    def _of_machines(self) -> str:
        device = self.steps[0].request.gpu
        assert isinstance(device, Device)
        assert device.memory_bytes is not None
        needs = f"model states alone need {self.state_bytes / GIB:,.1f} GiB of {device.memory_bytes / GIB:,.1f}"
        here = "It does not fit on this machine" + (f": {needs}." if self.floor > 1 else ".")
        if self.gpus is None:
            return f"{here} No number of machines like it that was tried runs it."
        states = f"{self.floor:,} would hold the model states and nothing else, " if self.floor < self.gpus else ""
        return f"{here} Of machines like it {states}{self.gpus:,} is the first number that runs."

    def _of_gpus(self) -> str:
        alone = f"{self.floor} is only the floor for model states"
        if self.gpus is None:
            may = f" ({self.expected} may, with little room)" if self.expected else ""
            parallel = f" With --parallel {self.parallel} is the first that runs." if self.parallel else ""
            return f"{alone}; no number of GPUs that was tried surely runs{may}.{parallel}"
        sooner = "" if self.expected == self.gpus else f" ({self.expected} may, with little room)"
        runs = f"{self.gpus} is the first that runs{sooner}"
        if self.gpus == self.floor:
            return f"{runs}; fewer would not even hold the model states."
        if self.gpus < self.floor:
            return f"{runs}, by offload; without, model states alone would need {self.floor}."
        return f"{alone}; {runs}."


def sizing_report(sizing: Sizing) -> SizingReport:
    """The answer in the models of the JSON."""
    return SizingReport.of(
        sizing,
        states_floor_gpus=sizing.floor,
        states_gb=sizing.state_bytes / 1e9,
        expected_gpus=sizing.expected,
        parallel_gpus=sizing.parallel,
        rows=tuple(sizing_row(step) for step in sizing.steps),
    )


def sizing_row(step: Frontier) -> SizingRow:
    """What was found on one number of devices."""
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


def _table(sizing: Sizing) -> TextTable:
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
    for row in map(sizing_row, sizing.steps[-SHOWN_ROWS:]):
        runs = "yes" if row.fits_surely else "with little room" if row.fits else "no"
        amounts = [row.device_gib, row.upper_gib]
        cells = ["" if value is None else f"{value:,.1f}" for value in amounts]
        speed = "" if row.tokens_per_s_per_gpu is None else f"{row.tokens_per_s_per_gpu:,.0f}"
        rows.append((f"{row.gpus:,}", runs, row.strategy or "", *cells, speed, row.reason))
    return TextTable(columns, tuple(rows), wrap=True)
