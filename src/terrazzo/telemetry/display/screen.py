"""A running run as a screen of text: how far it is, its last log steps, and where the time of a step goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, cast

from terrazzo.telemetry.display.step_table import StepTable, duration
from terrazzo.telemetry.log.records import restart_text, validation_text
from terrazzo.telemetry.log.sinks import ENDS_OF_RUNS
from terrazzo.telemetry.log.step_record import StepRecord
from terrazzo.telemetry.steps.metrics import StepMetrics
from terrazzo.telemetry.steps.time_left import TimeLeft

__all__ = ["has_ended", "rows_of", "screen_of"]

Lines = Sequence[Mapping[str, Any]]

_ROWS = 12
_BAR = 40
_SHOWN = 0.01
"""What takes less of a step than this share has no bar."""
_LATE = 5
"""A run is called silent after so many times the usual time between two records, and after `_PATIENCE_S`."""
_PATIENCE_S = 30.0


def has_ended(lines: Lines) -> bool:
    """Whether the run has ended in order: its last line is the summary, or a loop with `attach` has closed it."""
    return bool(lines) and lines[-1]["kind"] in ENDS_OF_RUNS


def rows_of(lines: Lines, steps: int | None, width: int, *, first: int = 0, most: int | None = None) -> list[str]:
    """A header and, below it, a row for each log step, evaluation and restart of the run.

    Empty before the first log step of a run of `terrazzo train`, which tells which columns there are.

    Args:
        steps: of the whole run; None if that is not known, as for a loop without a configuration.
        width: most characters in a line.
        first: number of the first line that is shown; those before it only tell which columns there are.
        most: rows below the header, the newest ones; None for all.
    """
    known = {name for line in lines if _is_log_step(line) for name in line.keys() & _NAMES}
    if not known and steps is not None and not has_ended(lines):
        return []
    table = StepTable(last := steps or int(lines[-1]["step"]), known, width)
    left_s, left = {}, TimeLeft()
    for line in lines:
        left.read(line)
        if _is_log_step(line):
            left_s[id(line)] = left.after(line["step"], last, line["step_s"])
    rows: list[str] = []  # from the newest on
    for line in reversed(lines[first:]):
        if len(rows) == most:
            break
        if _is_log_step(line):
            rows.append(table.row(_metrics(line), left_s[id(line)]))
        elif line["kind"] == "validation" and "loss" in line:
            rows.append(table.remark(line["step"], validation_text(line), f"{line['loss']:.4f}")[:width])
        elif line["kind"] == "restart":
            rows.append(table.remark(line["step"], restart_text(line))[:width])
        elif not known and line["kind"] == "step":  # written by `attach`, which does not know the loss
            rows.append(f"{line['step']:>6}  {line['step_s']:.3g} s a step")
    return [table.header() if known else f"{'step':>6}  time", *reversed(rows)]


def screen_of(  # structure: signature fixed by what a screen shows
    name: str,
    lines: Lines,
    *,
    steps: int | None,
    verdict: str | None,
    age_s: float,
    width: int,
    ranks: Sequence[str] = (),
) -> str:
    """The whole screen. Lines have at most `width` characters, except for the verdict's.

    Args:
        name: of the run.
        lines: of its `metrics.jsonl` so far, at least one.
        steps: of the whole run; None if that is not known.
        verdict: the sentence that ends the screen, if any.
        age_s: seconds since the last line was written.
        ranks: a line for each rank that says where it is now.
    """
    records = cast(list[StepRecord], [line for line in lines if line["kind"] == "step" and line.get("step_s")])
    parts = [_heading(name, lines, records, steps, age_s)]
    if rows := rows_of(lines, steps, width, most=_ROWS):
        parts.append("\n".join(rows))
    if records:
        parts.append(_causes(records[-1]))
        if waits := _ranks(records[-1]):
            parts.append(waits)
    if ranks:
        parts.append("\n".join(["now", *(f"  {line}"[:width] for line in _cut(ranks))]))
    return "\n\n".join([*parts, *([verdict] if verdict else [])])


_NAMES = frozenset(field.name for field in fields(StepMetrics))
_REQUIRED = frozenset(field.name for field in fields(StepMetrics) if field.default is MISSING) - {"loss"}
"""A loss that is not finite is not in the line."""


def _is_log_step(line: Mapping[str, Any]) -> bool:
    """Whether a line has the metrics of a log step, and all fields of them: another version may have written it."""
    return line["kind"] == "train" and line.keys() >= _REQUIRED


def _metrics(line: Mapping[str, Any]) -> StepMetrics:
    return StepMetrics(**{"loss": math.nan} | {name: line[name] for name in line.keys() & _NAMES})


def _heading(name: str, lines: Lines, records: Lines, steps: int | None, age_s: float) -> str:
    done = max(int(line["step"]) for line in lines)
    parts = [name, f"step {done}" + (f" of {steps}" if steps else "")]
    if has_ended(lines):
        return " · ".join([*parts, "ended"])
    if records and steps:
        left = TimeLeft()
        for line in lines:
            left.read(line)
        parts.append(f"{duration(left.after(done, steps, records[-1]['step_s']))} left")
    parts.append(f"last record {duration(age_s)} ago")
    between_s = records[-1]["steps"] * records[-1]["step_s"] if records else 0.0
    if age_s > max(_PATIENCE_S, _LATE * between_s):
        parts.append(f"SILENT: records came every {duration(between_s)}" if records else "SILENT")
    return " · ".join(parts)


def _causes(record: StepRecord) -> str:
    """A bar for each cause that takes at least `_SHOWN` of the step."""
    whole = record["step_s"]
    spent = record.get("cause_s") or record.get("phase_s") or {}
    shares = {name: seconds / whole for name, seconds in spent.items() if seconds >= _SHOWN * whole}
    wide = max(map(len, shares), default=0)
    bars = [f"  {name:<{wide}}  {share:>4.0%}  {_bar(share)}" for name, share in shares.items()]
    steps = record["steps"]
    newest = f"the last {steps} steps took {whole:.3g} s each" if steps > 1 else f"the last step took {whole:.3g} s"
    return "\n".join([newest, *bars])


def _ranks(record: StepRecord) -> str:
    """A bar for how long each rank waited for others; the rank that all wait for waits least.

    Empty where no rank waits for `_SHOWN` of the step; less than that is none beside others.
    """
    least = _SHOWN * record["step_s"]
    waits = [wait if wait >= least else 0.0 for wait in record.get("skew", {}).get("late_peer_s") or ()]
    if not any(waits):
        return ""
    bars = [f"  rank {rank:<4} {_plain(wait):>8} s  {_bar(wait / max(waits))}" for rank, wait in enumerate(waits)]
    return "\n".join(["waits for late ranks", *_cut(bars, "  ")])


def _plain(seconds: float) -> str:
    """Seconds with three digits, and never with an exponent."""
    return f"{seconds:.3g}" if seconds >= 1e-4 or not seconds else f"{seconds:.6f}"


def _cut(rows: Sequence[str], indent: str = "") -> Sequence[str]:
    return rows if len(rows) <= _ROWS else [*rows[:_ROWS], f"{indent}and {len(rows) - _ROWS} ranks more"]


def _bar(share: float) -> str:
    return "█" * round(_BAR * min(1.0, share))
