"""What was found for a model on machines: one plan, and where many were tried, the others and the sizing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from terrazzo.errors import BadInput
from terrazzo.planner.api import estimate
from terrazzo.planner.estimate import Estimate
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.stack import Finding, Stack
from terrazzo.planner.report.alternatives import alternatives
from terrazzo.planner.report.bars import Chart, chart_of
from terrazzo.planner.report.blocks import Block, Column, Line, Table, plain
from terrazzo.planner.report.convert import frontier_row, report_of
from terrazzo.planner.report.schema import RefusedRow, Report, SizingReport, SizingRow
from terrazzo.planner.report.text import detail
from terrazzo.planner.report.words import GIB, checkpointing_text, mesh_text
from terrazzo.planner.search.search import Frontier
from terrazzo.planner.search.sizing import Sizing
from terrazzo.planner.setup.setup import Setup

__all__ = ["Answer", "nearest", "text_of"]

NO_MESH = "No mesh of these GPUs is worth trying for this model; name a --strategy, or leave --tp and --pp open."
ROWS = 12  # of a table on screen; the JSON has all


@dataclass(frozen=True)
class Answer:
    """`best` is the plan that was asked for, the best of a search, or what comes nearest where nothing fits."""

    best: Estimate
    estimate: Callable[[Setup], Estimate]
    frontier: Frontier | None = None
    sizing: Sizing | None = None
    stack: Stack = field(default_factory=Stack)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is known against `best` in the framework that was named."""
        return findings(self.best.setup, self.stack)

    def report(self) -> Report:
        """For `--json`."""
        report = report_of(self.best, self.findings)
        if self.frontier is None:
            return report
        more = {
            "considered": self.frontier.considered,
            "frontier": tuple(frontier_row(each) for each in _leaders(self.frontier)),
            "refused": _refused(self.frontier),
            "sizing": None if self.sizing is None else _sizing(self.sizing),
        }
        return report.model_copy(update=more)

    def blocks(self) -> list[Block]:
        """For people."""
        verdict, *rest = detail(self.best, self.findings)
        if self.frontier is None:
            return [verdict, *rest]
        setup = self.best.setup
        where = Line(f"  {setup.plan.name} on {setup.cluster.count:,} × {setup.cluster.device.name}")
        first = (
            [verdict, where] if self.sizing is None else [Line(str(self.sizing), "bold"), _sizing_table(self.sizing)]
        )
        title = "the best plan in detail" if self.frontier.ranked else "what comes nearest"
        return [*first, *_frontier(self.frontier), Line(f"\n{title}", "bold"), *rest]

    def chart(self) -> Chart:
        """Memory by strategy, all else as in `best`."""
        return chart_of(alternatives(self.best, self.estimate), self.best)


def nearest(frontier: Frontier, estimate: Callable[[Setup], Estimate]) -> Estimate:
    """Where nothing fits: of what was refused for its memory, what lacks least.

    Errors: `BadInput` where memory is no reason.
    """
    least = frontier.nearest
    if least is None or least.setup is None:
        reasons = [f"{refusal.strategy}: {refusal.reason}" for refusal in frontier.refused[:1]]
        raise BadInput(f"Nothing can be planned. {(reasons or [NO_MESH])[0]}")
    return estimate(least.setup)


def text_of(found: Estimate | Frontier) -> str:
    """What `terrazzo plan` prints of it, but for the bars."""
    if isinstance(found, Estimate):
        return plain(Answer(found, estimate).blocks()).rstrip()
    try:
        best = found.best or nearest(found, estimate)
    except BadInput as error:
        return plain([Line(str(error)), *_refusals(found)]).rstrip()
    return plain(Answer(best, estimate, found).blocks()).rstrip()


def _leaders(frontier: Frontier) -> list[Estimate]:
    """In order of rank, the first of each strategy and mesh, and all that nothing else beats."""
    seen, leaders = set(), []
    for found in frontier.ranked:
        key = (found.setup.plan.name, found.setup.mesh, found.setup.cluster.count)
        if key not in seen or found in frontier.pareto:
            leaders.append(found)
        seen.add(key)
    return leaders


def _refused(frontier: Frontier) -> tuple[RefusedRow, ...]:
    return tuple(
        RefusedRow(
            strategy=each.strategy,
            gpus=each.gpus,
            reason=each.reason,
            candidates=each.candidates,
            needed_gib=each.needed_bytes / GIB if each.needed_bytes else None,
        )
        for each in frontier.refused
    )


def _sizing(sizing: Sizing) -> SizingReport:
    return SizingReport(
        states_floor_gpus=sizing.floor,
        states_gb=sizing.state_bytes / 1e9,
        gpus=sizing.gpus,
        expected_gpus=sizing.expected,
        rows=tuple(_sizing_row(step) for step in sizing.steps),
    )


def _sizing_row(step: Frontier) -> SizingRow:
    best = step.best
    return SizingRow(
        gpus=step.request.gpus,
        fits=best is not None,
        fits_surely=best is not None and bool(best.memory.fits_surely),
        strategy=best.setup.plan.name if best else None,
        device_gib=best.memory.device_bytes / GIB if best else None,
        upper_gib=best.memory.upper_bytes / GIB if best else None,
        tokens_per_s_per_gpu=best.time.tokens_per_s_per_gpu if best and best.time else None,
        reason="" if best else min(step.refused, key=lambda each: each.overrun).reason,
    )


def _sizing_table(sizing: Sizing) -> Table:
    columns = (
        Column("GPUs", "right"),
        Column("runs"),
        Column("strategy", keep=8),
        Column("GiB", "right", 8),
        Column("upper", "right", 5),
        Column("tok/s/GPU", "right", 6),
        Column("why not"),
    )
    rows = []
    for row in map(_sizing_row, sizing.steps[-ROWS:]):
        runs = "yes" if row.fits_surely else "with little room" if row.fits else "no"
        amounts = [row.device_gib, row.upper_gib]
        cells = ["" if value is None else f"{value:,.1f}" for value in amounts]
        speed = "" if row.tokens_per_s_per_gpu is None else f"{row.tokens_per_s_per_gpu:,.0f}"
        rows.append((f"{row.gpus:,}", runs, row.strategy or "", *cells, speed, row.reason))
    return Table(columns, tuple(rows), wrap=True)


def _frontier(frontier: Frontier) -> list[Block]:
    leaders = _leaders(frontier)
    blocks: list[Block] = []
    if leaders:
        blocks.append(_ranked(leaders[:ROWS]))
        blocks.append(Line(f"{frontier.considered:,} plans compared, {len(frontier.ranked):,} fit.", "dim"))
    return blocks + _refusals(frontier)


def _refusals(frontier: Frontier) -> list[Block]:
    """Each reason once, with the strategies and the numbers of GPUs that it holds for."""
    tried = {refusal.gpus for refusal in frontier.refused}
    reasons: dict[str, dict[str, list[int]]] = {}
    for refusal in frontier.refused:
        reason = refusal.reason.removeprefix(f"{refusal.strategy} ")
        reasons.setdefault(reason, {}).setdefault(refusal.strategy, []).append(refusal.gpus)
    lines = []
    for reason, strategies in list(reasons.items())[:ROWS]:
        alike: dict[tuple[int, ...], list[str]] = {}  # strategies by the numbers of GPUs that it holds them back on
        for strategy, found in strategies.items():
            alike.setdefault(tuple(sorted(set(found))), []).append(strategy)
        for counts, names in alike.items():
            where = f" on {', '.join(map(str, counts))} GPUs" if len(tried) > 1 else ""
            lines.append(Line(f"  {', '.join(names)}{where}: {reason}"))
    return [Line("\nwhat does not run", "bold"), *lines] if lines else []


def _ranked(leaders: list[Estimate]) -> Table:
    columns = (
        Column("strategy"),
        Column("mesh", keep=5),
        Column("checkpointing", keep=7),
        Column("micro-batch", "right", 7),
        Column("GiB", "right", 8),
        Column("upper", "right", 4),
        Column("tok/s/GPU", "right", 8),
        Column("MFU", "right", 6),
        Column("bound by", keep=3),
        Column("fits", keep=6),
    )
    return Table(columns, tuple(_ranked_row(found) for found in leaders))


def _ranked_row(found: Estimate) -> tuple[str, ...]:
    setup, memory, time = found.setup, found.memory, found.time
    return (
        setup.plan.name,
        mesh_text(setup.mesh),
        checkpointing_text(setup),
        f"{setup.micro_batch} × {setup.micro_batches}",
        f"{memory.device_bytes / GIB:,.1f}",
        f"{memory.upper_bytes / GIB:,.1f}",
        f"{time.tokens_per_s_per_gpu:,.0f}" if time else "",
        f"{time.mfu:.1%}" if time and time.mfu is not None else "n/a",
        time.bound_by if time else "",
        "surely" if memory.fits_surely else {True: "yes", False: "no", None: "?"}[memory.fits],
    )
