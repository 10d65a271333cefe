"""Memory, traffic and time as lines and tables, each term with its share."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures, Term, TimeFigures, TrafficFigures
from terrazzo.planner.report.blocks import TableColumn, TextBlock, TextLine, TextTable
from terrazzo.planner.report.words import (
    AT_MOST,
    HOSTS,
    LABELS,
    ByteUnit,
    bytes_text,
    room_text,
    seconds_text,
    units,
)
from terrazzo.planner.setup.setup import Setup

__all__ = ["memory_blocks", "pace_line", "time_blocks", "traffic_blocks"]


REASONED = 0.05
"""Share of all that a rank holds from which on unreduced gradients are given a reason."""


def memory_blocks(memory: MemoryFigures, setup: Setup) -> list[TextBlock]:
    """Memory of the fullest rank, and of its host."""
    return [
        _memory_table(memory),
        *_unreduced(memory, setup),
        *_fullest(memory),
        *_elsewhere("host memory", memory.host_terms),
        *_elsewhere("disk", memory.disk),
        *_hosts(memory),
    ]


def pace_line(time: TimeFigures) -> TextLine:
    """How fast it is, and how far that is to be believed."""
    parts = [f"{seconds_text(time.step_s)} per step", f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"]
    parts.append("MFU n/a" if time.mfu is None else f"MFU {time.mfu:.1%}")
    parts.append(f"bound by {time.bound_by}")
    if time.cost_per_million_tokens is not None:
        parts.append(f"{time.cost_per_million_tokens:,.3g} per million tokens")
    trust = "rates measured on this device" if time.rates_measured else "not calibrated"
    trust = "calibrated on this device" if time.calibrated else trust
    return TextLine(f"{', '.join(parts)} ({trust}{f', ±{time.band:.0%}' if time.band else ''})")


def _memory_table(memory: MemoryFigures) -> TextTable:
    """Expected bytes of each term, and what comes on top of their sum."""
    big, small = units(memory.allocated_bytes)
    columns = (
        TableColumn("memory of the fullest rank"),
        TableColumn(big.name, "right"),
        TableColumn(small.name, "right", 5),
        TableColumn("share", "right", 6),
        TableColumn("formula", keep=1),
    )
    rows = _term_rows(memory.terms, big, small)
    sums = {
        "allocated by tensors": memory.allocated_bytes,
        "reserved by the allocator": memory.reserved_bytes,
        "on the device, expected": memory.expected_bytes,
        "on the device, at most": memory.most_bytes,
    }
    rows += [(name, big.of(value), small.of(value), "", "") for name, value in sums.items()]
    return TextTable(columns, tuple(rows), totals=len(sums))


def _unreduced(memory: MemoryFigures, setup: Setup) -> list[TextBlock]:
    """Why gradients are there that no collective has taken, where they are much: what of the setup makes them."""
    held = sum(term.value for term in memory.terms if term.name == "unreduced")
    if held < REASONED * memory.allocated_bytes:
        return []
    return [TextLine(f"{LABELS['unreduced']}: {_why_unreduced(setup)}")]


def _why_unreduced(setup: Setup) -> str:
    if setup.as_megatron:
        return "Megatron-core's buffers of whole ones of all units, from step to step"
    if setup.micro_batches == 1:
        return "whole ones of the units whose backward runs, the root among them, until ranks have summed them"
    if not setup.sums_locally:
        return (
            "whole ones of the units whose backward runs, the root among them, and this rank's part of what "
            f"{setup.micro_batches} micro-batches add up to"
        )
    if setup.accumulate_locally:
        why = "--accumulate-locally; with --reduce-each its part alone"
    elif setup.staged:
        why = "a pipeline sums over ranks once in a step"
    else:
        why = f"{setup.plan.name} splits no gradients"
    return f"whole ones of all units, which each rank adds up over {setup.micro_batches} micro-batches ({why})"


def _fullest(memory: MemoryFigures) -> list[TextBlock]:
    """Which rank is fullest, and what the others along pp hold."""
    lines = [TextLine(f"fullest: {memory.limiting_rank}. {AT_MOST}")]
    if len(memory.per_pp_rank) > 1:
        ranks = ", ".join(f"{value / GIB:,.1f}" for value in memory.per_pp_rank)
        lines.append(TextLine(f"GiB by rank along pp: {ranks}"))
    return list(lines)


def _elsewhere(where: str, terms: Sequence[Term]) -> list[TextBlock]:
    """A table of what is kept in host memory or on disk, if anything is."""
    if not terms:
        return []
    big, small = units(sum(term.value for term in terms))
    columns = (TableColumn(f"{where} of one rank"), TableColumn(big.name, "right"), TableColumn(small.name, "right", 5))
    rows = tuple((*_amounts(term, big, small), term.formula) for term in terms)
    return [TextTable((*columns, TableColumn("formula", keep=1)), rows)]


def _hosts(memory: MemoryFigures) -> list[TextBlock]:
    """What the ranks of a host keep there together, of what there is, and what they wear off its disks."""
    lines = [
        TextLine(f"{HOSTS[room.name]} of one host: {room_text(room)}") for room in memory.rooms if room.name in HOSTS
    ]
    if written := memory.ranks_per_host * sum(term.value for term in memory.disk_writes):
        lines.append(TextLine(f"written to them in a step: {bytes_text(written)}"))
    return list(lines)


def traffic_blocks(traffic: TrafficFigures) -> list[TextBlock]:
    """What is sent, by what it is for and by link."""
    if not traffic.collectives:
        return [TextLine("no traffic: nothing is sent")]
    big, small = units(traffic.total_bytes)
    columns = (
        TableColumn("sent by one rank in a step"),
        TableColumn(big.name, "right", 5),
        TableColumn(small.name, "right"),
        TableColumn("share", "right", 6),
        TableColumn("formula", keep=1),
    )
    rows = _term_rows(traffic.collectives, big, small)
    rows.append(("in all", big.of(traffic.total_bytes), small.of(traffic.total_bytes), "", ""))
    links = ", ".join(f"{link} {small.of(value)} {small.name}" for link, value in traffic.links.items() if value)
    return [TextTable(columns, tuple(rows), totals=1), *([TextLine(f"by link: {links}")] if links else [])]


def time_blocks(time: TimeFigures) -> list[TextBlock]:
    """The time of a step, term by term."""
    columns = (
        TableColumn("time of a step"),
        TableColumn("", "right"),
        TableColumn("share", "right", 6),
        TableColumn("formula", keep=1),
    )
    rows = [
        (term.name, seconds_text(term.value), _share(term.value, time.step_s), term.formula)
        for term in time.terms
        if term.value
    ]
    rows.append(("in all", seconds_text(time.step_s), "", ""))
    hidden = f"hidden behind it: {seconds_text(time.hidden_s)} of communication"
    return [TextTable(columns, tuple(rows), totals=1), *([TextLine(hidden)] if time.hidden_s else [])]


def _term_rows(terms: Sequence[Term], big: ByteUnit, small: ByteUnit) -> list[tuple[str, ...]]:
    """A row for each term of which two digits show anything."""
    total = sum(term.value for term in terms)
    shown = [term for term in terms if term.value >= 0.005 * big.size]
    return [(*_amounts(term, big, small), _share(term.value, total), term.formula) for term in shown]


def _amounts(term: Term, big: ByteUnit, small: ByteUnit) -> tuple[str, str, str]:
    return LABELS.get(term.name, term.name), big.of(term.value), small.of(term.value)


def _share(value: float, total: float) -> str:
    return f"{value / total:.1%}" if total else ""
