"""What can be said of a bare number of parameters: model states and traffic under the four ZeRO stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from terrazzo.engine import Plan
from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.messages import GIB, counted
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.machine.transfers import Link, When
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.report.bars import Chart, MemoryBar
from terrazzo.planner.report.blocks import TableColumn, TextBlock, TextLine, TextTable
from terrazzo.planner.report.schema import PerRank, StatesReport, StatesRow
from terrazzo.planner.report.words import GB, count_text
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import unit_moves

__all__ = ["BareAnswer"]

STAGES = ("zero0", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class BareAnswer:
    """States of a number of parameters, each stage's on the same ranks.

    Attributes:
        request: its model is a number; its strategy, if it names one, is the only one shown.
        capacity_bytes: of one rank's device, None if none was named.
    """

    request: Request
    capacity_bytes: int | None = None

    @cached_property
    def setups(self) -> list[Setup]:
        """One for each stage. Raises: `BadInput` for ranks that the strategy cannot use."""
        named = self.request.plan
        plans = [Plan.named(stage) for stage in STAGES] if named is None else [named]
        setups = [build_setup(replace(self.request, strategy=plan)) for plan in plans]
        for setup in setups:
            check(setup)
        return setups

    def report(self) -> StatesReport:
        """The answer as `--json` prints it."""
        setup = self.setups[0]
        parts = {name: value * GB / setup.model.numel for name, value in _states_gb(_alone(setup)).items()}
        return StatesReport(
            parameters=setup.model.numel,
            world=setup.cluster.count,
            recipe=parts,
            capacity_gib=None if self.capacity_bytes is None else self.capacity_bytes / GIB,
            plans=tuple(self._row(setup) for setup in self.setups),
        )

    def blocks(self) -> list[TextBlock]:
        """The answer as people read it."""
        report = self.report()
        bytes_each = ", ".join(f"{value:g} for {name}" for name, value in report.recipe.items())
        head = f"{count_text(report.parameters)} parameters on {counted(report.world, 'rank')}: model states alone"
        capacity = f", {report.capacity_gib:,.1f} GiB on each" if report.capacity_gib is not None else ""
        zero = "; as in the ZeRO paper. --model assumes --precision bf16, with gradients in fp32"
        counted_as = zero if self.request.precision == "zero" else ""
        lines = [TextLine(head + capacity, "bold"), TextLine(f"bytes per parameter: {bytes_each}{counted_as}")]
        columns = [TableColumn("GB of one rank"), *(TableColumn(name, "right", 5) for name in report.recipe)]
        columns += [
            TableColumn("states", "right"),
            TableColumn("GiB", "right", 6),
            TableColumn("sent in a step", "right", 7),
        ]
        columns += (
            [TableColumn("fits"), TableColumn("ranks needed", "right")] if report.capacity_gib is not None else []
        )
        rows = tuple(_cells(row, report.capacity_gib is not None) for row in report.plans)
        note = "Activations, buffers and libraries come on top: --model counts them."
        return [*lines, TextTable(tuple(columns), rows), TextLine(note, "dim")]

    def chart(self) -> Chart:
        """States by stage."""
        report = self.report()
        bars = []
        for row in report.plans:
            per_rank = row.per_rank
            states = {
                "weights": per_rank.weights_gb,
                "gradients": per_rank.grads_gb,
                "optimizer": per_rank.optimizer_gb,
            }
            bars.append(MemoryBar(row.strategy, {name: value * GB for name, value in states.items()}))
        title = f"Model states of {count_text(report.parameters)} parameters on {counted(report.world, 'rank')}"
        subtitle = "bytes per parameter: " + ", ".join(f"{name} {value:g}" for name, value in report.recipe.items())
        return Chart(title, subtitle, tuple(bars), self.capacity_bytes, "states of one rank")

    def _row(self, setup: Setup) -> StatesRow:
        states = _states_gb(setup)
        total = sum(states.values())
        return StatesRow(
            strategy=setup.plan.name,
            per_rank=PerRank(
                weights_gb=states["weights"],
                grads_gb=states["grads"],
                optimizer_gb=states["optimizer"],
                states_gb=total,
                states_gib=total * GB / GIB,
            ),
            traffic_gb={"total": _sent_bytes(setup) / GB},
            fits=None if self.capacity_bytes is None else total * GB <= self.capacity_bytes,
            min_ranks=self._fewest(setup),
        )

    def _fewest(self, setup: Setup) -> int | None:
        """Ranks whose memory holds the states: what is split shrinks with their number, what is not stays."""
        if self.capacity_bytes is None or setup.mesh.dp_replicate > 1:
            return None
        whole, split = sum(_states_gb(_alone(setup)).values()), sum(_states_gb(_alone(setup, 2)).values())
        divided = 2 * (whole - split)
        room = self.capacity_bytes / GB - (whole - divided)
        if whole * GB <= self.capacity_bytes:
            return 1
        return math.ceil(divided / room) if room > 0 and divided > 0 else None


def _alone(setup: Setup, ranks: int = 1) -> Setup:
    mesh = replace(setup.mesh, dp_replicate=1, dp_shard=ranks)
    return replace(setup, mesh=mesh, cluster=replace(setup.cluster, count=ranks))


def _sent_bytes(setup: Setup) -> float:
    """The published volume of a step: what one rank sends without the factor (n - 1) / n of a ring of n ranks.

    2 or 3 times the weights over one axis (ZeRO, arXiv 1910.02054, section 7), and nothing on one rank.
    """
    sent: dict[tuple[str, ...], float] = {}
    ranks: dict[tuple[str, ...], int] = {}
    unit = replace(setup.model.root, name="all")  # not the root: the paper gathers all weights again for backward
    for move in unit_moves(setup, unit, placement_of(setup, ON_DEVICE)):
        if isinstance(move.over, Link) or move.when is When.REDUCE:  # of one micro-batch, which is the last
            continue
        key = (move.kind, move.what, move.when, move.over.axis if move.kind == "all_reduce" else "")
        sent[key] = sent.get(key, 0.0) + move.sent_bytes
        ranks[key] = ranks.get(key, 1) * move.over.size
    return sum(value * ranks[key] / (ranks[key] - 1) for key, value in sent.items() if ranks[key] > 1)


def _states_gb(setup: Setup) -> dict[str, float]:
    terms = {term.name: term.value / GB for term in state_terms(setup)}
    optimizer = terms["master"] + terms["moments"]
    return {"weights": terms["weights"], "grads": terms["gradients"], "optimizer": optimizer}


def _cells(row: StatesRow, against: bool) -> tuple[str, ...]:
    per_rank = row.per_rank
    amounts = (per_rank.weights_gb, per_rank.grads_gb, per_rank.optimizer_gb, per_rank.states_gb, per_rank.states_gib)
    cells = (row.strategy, *(f"{value:,.2f}" for value in amounts), f"{row.traffic_gb['total']:,.0f} GB")
    if not against:
        return cells
    return (*cells, "yes" if row.fits else "no", "none" if row.min_ranks is None else f"{row.min_ranks:,}")
