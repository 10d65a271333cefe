"""Log steps as rows of a table, each one line that fits the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from terrazzo.messages import GIB
from terrazzo.telemetry.steps.metrics import StepMetrics

__all__ = ["StepTable", "duration"]


class _Column(NamedTuple):
    """A column. Runs without the metric `needs` do not have it. If not all columns fit, those of lower `rank` stay."""

    title: str
    width: int
    rank: int
    cell: Callable[[StepMetrics], str]
    needs: str = ""


def _share(value: float | None) -> str:
    """A percentage; blank if it is not known or rounds to zero, so that what is there stands out."""
    return f"{value:.0%}" if value and value >= 0.005 else ""


def _norm(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1e}"


def _short(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits if value < 100 else 0}f}"


_COLUMNS = (
    _Column("loss", 7, 0, lambda m: f"{m.loss:.4f}"),
    _Column("norm", 7, 6, lambda m: _norm(m.grad_norm)),
    _Column("lr", 7, 11, lambda m: f"{m.learning_rate:.1e}"),
    _Column("tok/s", 10, 1, lambda m: f"{m.tokens_per_s:,.0f}"),
    _Column("MFU", 5, 4, lambda m: "" if m.mfu is None else f"{m.mfu:.1%}", "mfu"),
    _Column("TFLOP/s", 7, 4, lambda m: _short(m.tflops, 1), "tflops"),
    _Column("comm", 4, 5, lambda m: _share(m.communication), "communication"),
    _Column("data", 4, 10, lambda m: _share(m.data_wait)),
    _Column("read GB/s", 9, 7, lambda m: _short(m.disk_read_gb_s), "disk_read_gb_s"),
    _Column("write GB/s", 10, 8, lambda m: _short(m.disk_write_gb_s), "disk_write_gb_s"),
    _Column("CPU Gparam/s", 12, 9, lambda m: _short(m.cpu_step_gparam_s), "cpu_step_gparam_s"),
    _Column("skipped", 7, 3, lambda m: str(m.skipped_steps or ""), "skipped_steps"),
    _Column("busiest", 7, 12, lambda m: _short(m.expert_imbalance), "expert_imbalance"),
    _Column("memory", 9, 2, lambda m: f"{_short(m.peak_memory_bytes / GIB, 2)} GiB"),
)
_LEFT = 7
_GAP = 2


class StepTable:
    """The header and rows of a run's table. Values of columns that do not fit are in `metrics.jsonl` all the same.

    Args:
        steps: of the whole run.
        known: the optional metrics that this run measures on its device; the others get no column.
        width: most characters in a line.
    """

    def __init__(self, steps: int, known: Collection[str], width: int) -> None:
        self._step = max(6, len(str(steps)))
        known = {*known} - ({"tflops"} if "mfu" in known else set())  # which says the same
        self._columns: tuple[_Column, ...] = ()
        room = width - self._step - (_GAP + _LEFT)
        for column in sorted(_COLUMNS, key=lambda column: column.rank):
            if (not column.needs or column.needs in known) and room >= _GAP + column.width:
                room -= _GAP + column.width
                self._columns += (column,)
        self._columns = tuple(column for column in _COLUMNS if column in self._columns)

    def header(self) -> str:
        """The columns' titles."""
        return self._line("step", [column.title for column in self._columns], "left")

    def row(self, metrics: StepMetrics, left_s: float) -> str:
        """The row of a log step; `left_s`: seconds to the end of the run, as `TimeLeft` has them."""
        return self._line(str(metrics.step), [column.cell(metrics) for column in self._columns], duration(left_s))

    def remark(self, step: int, text: str, loss: str = "") -> str:
        """A line of text about a step, in the place of a row; `loss`, if given, stands in the column of losses."""
        return f"{step:>{self._step}}  {f'{loss:>{_COLUMNS[0].width}}  ' if loss else ''}{text}"

    def _line(self, step: str, cells: list[str], left: str) -> str:
        shown = [f"{cell:>{column.width}}" for column, cell in zip(self._columns, cells, strict=True)]
        return (" " * _GAP).join([f"{step:>{self._step}}", *shown, f"{left:>{_LEFT}}"])


def duration(seconds: float) -> str:
    """`38 s`, `12 min`, `3.4 h` or `12 d`."""
    for unit, of_them in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * of_them:
            return f"{seconds / of_them:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds:.0f} s"
