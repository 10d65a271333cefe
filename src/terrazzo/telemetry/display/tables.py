"""The records of a run's steps as tables: causes, phases, exchanges, ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from terrazzo.telemetry.flight.ring import Flight
from terrazzo.telemetry.flight.units import UnitTimes, unit_times
from terrazzo.telemetry.log.records import mean_of, mean_over_steps, of_these_ranks
from terrazzo.telemetry.log.step_record import StepParts, StepRecord

__all__ = ["Table", "table_of_units", "tables_of"]

MOST_UNITS = 24

Records = Sequence[StepRecord]


class Table(NamedTuple):
    """A titled table. Each row has as many cells as `head`; all cells but the first are numbers."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables_of(records: Records) -> list[Table]:
    """Tables of means per step, over the newest records with the present number of ranks; none without rows."""
    records = of_these_ranks(records)
    tables = [
        _of_parts("Seconds of a step by cause", records, "cause_s"),
        _of_parts("Seconds of a step by phase", records, "phase_s"),
        _of_exchanges(records),
        _of_memory(records),
        _of_ranks(records),
    ]
    return [table for table in tables if table.rows]


def table_of_units(flight: Flight) -> Table | None:
    """Seconds of a step for the units of one rank that take longest, in the model's order; None before a step."""
    times = unit_times(flight)
    if not times:
        return None
    shown = sorted(times, key=lambda each: -each.total)[:MOST_UNITS]
    names = [name for name in UnitTimes._fields[1:] if any(getattr(each, name) for each in times)]
    title = f"Seconds of a step by unit, rank {flight.table['rank']}"
    if len(times) > len(shown):
        title += f": the {len(shown)} longest of {len(times)}"
    rows = [(each.unit, *(_number(getattr(each, name)) for name in names)) for each in times if each in shown]
    return Table(title, ("unit", *(name.replace("_", " ") for name in names)), rows)


def _of_parts(title: str, records: Records, field: StepParts) -> Table:
    names = [name for name in (records[-1].get(field) or {}) if mean_of(records, field, name)]
    whole = mean_of(records, "step_s")
    rows = [(name, mean_of(records, field, name)) for name in names]
    return Table(
        title, (field.removesuffix("_s"), "s", "share"), [(n, _number(s), f"{s / whole:.1%}") for n, s in rows]
    )


def _of_exchanges(records: Records) -> Table:
    """A row for each exchange, with a column for each number that records have of some."""
    keys = sorted({key for record in records for key in record.get("comm", {})})
    had = {name for record in records for row in record.get("comm", {}).values() for name in row}
    columns = {name: column for name, column in _OF_EXCHANGES.items() if name in had}
    rows = [
        (key, *(column.cell(mean_of(records, "comm", key, name)) for name, column in columns.items())) for key in keys
    ]
    return Table("Exchanges of a step", ("axis, kind", *(column.title for column in columns.values())), rows)


def _of_memory(records: Records) -> Table:
    by_state = records[-1].get("memory_bytes", {})
    rows = [(name, f"{count / 2**20:,.1f}") for name, count in by_state.items() if name != "retries" and count]
    return Table("Memory of rank 0", ("state", "MiB"), rows)


def _of_ranks(records: Records) -> Table:
    skew = records[-1].get("skew", {})
    columns = [name for name, values in skew.items() if values]
    ranks = len(skew[columns[0]]) if columns else 0
    rows = [(str(rank), *(_of_rank(records, name, rank) for name in columns)) for rank in range(ranks)]
    return Table("Ranks", ("rank", *(_titled(name) for name in columns)), rows)


def _of_rank(records: Records, name: str, rank: int) -> str:
    """A cell of the table of ranks: seconds are means over records, bytes are the newest."""
    if name.endswith("_bytes"):
        return f"{records[-1]['skew'][name][rank] / 2**20:,.1f}"
    having = [record for record in records if record.get("skew", {}).get(name)]
    return _number(mean_over_steps(having, [record["skew"][name][rank] for record in having]))


def _titled(name: str) -> str:
    return {"peak_bytes": "peak MiB"}.get(name, name.removesuffix("_s").replace("_", " ") + " s")


def _number(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 1 else f"{seconds:.3f}"


class _ExchangeColumn(NamedTuple):
    title: str
    cell: Callable[[float], str]


_OF_EXCHANGES = {
    "n": _ExchangeColumn("n", lambda count: f"{count:.4g}"),
    "sent_bytes": _ExchangeColumn("MiB sent", lambda sent: f"{sent / 2**20:.2f}"),
    "total_s": _ExchangeColumn("total s", _number),
    "exposed_s": _ExchangeColumn("exposed s", _number),
    "late_s": _ExchangeColumn("late s", _number),
}
"""Columns by the field of an `ExchangeRow`."""
