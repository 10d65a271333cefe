"""What a search found, and how it reads: what fits in order of rank, and what does not run with the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrazzo.errors import BadInput
from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.report.blocks import TableColumn, TextBlock, TextLine, TextTable, plain
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.words import AT_MOST, axes_text, checkpointing_text, fits_text
from terrazzo.planner.setup.assumptions import assumptions
from terrazzo.planner.setup.build_setup import request_of
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["NO_MESH", "SHOWN_ROWS", "Frontier", "Refusal"]

NO_MESH = "No mesh of these GPUs is worth trying for this model; name a --strategy, or leave --tp and --pp open."
FIRST = {"throughput": "the fastest", "gpus": "what takes the fewest GPUs", "cost": "the cheapest token"}
"""What stands first, by `request.rank_by`."""
UNTIMED = "what computes least twice, and then sends the fewest bytes per token, since no time is known,"
ONE_RANK = "With one rank for all data nothing is split: all strategies are one, and stand as the first of them."
PLANNED_LAST = ", and of either what this version runs before what is `planned`"
OWN_BATCHES = (
    "Each plan is rated at a batch of its own, in sequences of a step: the larger, the more of them share what a step "
    "costs once. To compare all at one, give it, such as --global-batch {}."
)
BEYOND = "Beyond what is tried of every plan, and tried of the best alone: {}. Name it to compare all plans with it."
SHOWN_ROWS = 12
"""Rows of a table on screen; the JSON has all."""


@dataclass(frozen=True)
class Refusal:
    """Candidates of one strategy on one number of devices that cannot be, with the reason of the one that came nearest.

    Attributes:
        reason: a sentence.
        candidates: how many there are.
        needed_bytes: what the one that came nearest is expected to take in the device's memory; None where memory, be
            it the device's, the host's or a disk, is not the reason.
        setup, memory: of that one; None likewise.
    """

    strategy: str
    gpus: int
    reason: str
    candidates: int
    needed_bytes: float | None = None
    setup: Setup | None = None
    memory: MemoryFigures | None = None

    @property
    def overrun(self) -> float:
        """How many times too much it takes, where it takes most; infinite where memory is not the reason."""
        return (self.memory and self.memory.overrun) or math.inf


@dataclass(frozen=True)
class Frontier:
    """What a search found.

    Attributes:
        ranked: what fits, best first, as `request.rank_by` says; what fits surely comes before what is expected to,
            and of either what runs before what is planned alone.
        pareto: those of them that no other beats in both memory and tokens per second, by memory.
        considered: candidates in all.
        closest: where nothing fits, what lacks least of what memory refused, with the edits with which something fits
            if they were looked for; None where memory refused nothing.
        beyond: what of the best is more than was tried of every plan, with the option that names it.
    """

    request: Request
    ranked: tuple[Estimate, ...]
    pareto: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    considered: int
    closest: Estimate | None = None
    beyond: tuple[str, ...] = ()

    @property
    def best(self) -> Estimate | None:
        """What to run; None where nothing fits."""
        return next(iter(self.ranked), None)

    @property
    def is_possible(self) -> bool:
        """Whether anything was planned, whether it fits or not."""
        return bool(self.best or self.closest)

    @property
    def nearest(self) -> Refusal | None:
        """The refusal for want of memory that lacks the smallest share; None where memory refused nothing."""
        return min((one for one in self.refused if one.setup), key=lambda one: one.overrun, default=None)

    @property
    def leaders(self) -> list[Estimate]:
        """The first of each strategy and mesh, and all that nothing else beats, in order of rank."""
        seen, leaders = set(), []
        for each in self.ranked:
            setup = each.setup
            key = (setup.plan.name, setup.mesh, setup.cluster.count)
            if key not in seen or each in self.pareto:
                leaders.append(each)
            seen.add(key)
        return leaders

    def __str__(self) -> str:
        """The report that `terrazzo plan` prints, but for the bars."""
        try:
            best = self.detailed()
        except BadInput as error:
            return plain([TextLine(str(error)), *_refusals(self)]).rstrip()
        return plain(self.blocks(best)).rstrip()

    def detailed(self) -> Estimate:
        """The best, or where nothing fits what comes closest, with a note of everything that the request left open and
        a search does not choose.

        Raises:
            BadInput: nothing fits, and memory is no reason.
        """
        shown = self.best or self.closest
        if shown is None:
            reasons = {refusal.reason: refusal.strategy for refusal in reversed(self.refused)}
            why = [f"{strategy}: {reason}" if len(reasons) > 1 else reason for reason, strategy in reasons.items()]
            raise BadInput(f"Nothing can be planned. {(why or [NO_MESH])[-1]}")
        known = request_of(self.request, shown.setup)
        beyond = (BEYOND.format(", ".join(self.beyond)),) if self.beyond else ()
        return replace(shown, notes=(*beyond, *assumptions(known, shown.setup), *shown.notes))

    def blocks(self, best: Estimate, head: Sequence[TextBlock] = ()) -> list[TextBlock]:
        """All estimates in short and `best` in detail.

        Args:
            head: what stands above everything; without it the verdict on `best` does.
        """
        where = TextLine(f"  {best.setup.plan.name} on {best.setup.cluster.count:,} × {best.setup.cluster.device.name}")
        title = "the best plan in detail" if self.ranked else "what comes nearest"
        top = [*best.halting_lines(), *(head or (best.verdict_line(), where))]
        return [*top, *_ranking(self), TextLine(f"\n{title}", "bold"), *best.detail_blocks()]


def _ranking(frontier: Frontier) -> list[TextBlock]:
    leaders = frontier.leaders
    blocks: list[TextBlock] = []
    if leaders:
        blocks.append(_ranked(leaders[:SHOWN_ROWS]))
        counts = f"{frontier.considered:,} plans compared, {len(frontier.ranked):,} fit."
        timed = any(each.time is not None for each in leaders)
        rank_by = frontier.request.rank_by
        first = FIRST[rank_by] if timed or rank_by == "gpus" else UNTIMED
        order = "What fits surely, also at most, stands before what is expected to fit"
        order += PLANNED_LAST if any(not each.runs_now for each in leaders) else ""
        blocks.append(TextLine(f"{counts} {order};", "dim"))
        simple = ", of what is as fast within 3 % the simplest" if timed else ""
        blocks.append(TextLine(f"among these {first} is first{simple}. {AT_MOST}", "dim"))
        batches = {each.setup.global_batch for each in leaders}
        if timed and len(batches) > 1:
            blocks.append(TextLine(OWN_BATCHES.format(max(batches)), "yellow"))
        if frontier.request.plan is None and any(not each.setup.splits_states for each in leaders):
            blocks.append(TextLine(ONE_RANK))
    return blocks + _refusals(frontier)


def _refusals(frontier: Frontier) -> list[TextBlock]:
    """Each reason once, with the strategies and the numbers of GPUs that it holds for."""
    tried = {refusal.gpus for refusal in frontier.refused}
    reasons: dict[str, dict[str, list[int]]] = {}
    for refusal in frontier.refused:
        reason = refusal.reason.removeprefix(f"{refusal.strategy} ")
        reasons.setdefault(reason, {}).setdefault(refusal.strategy, []).append(refusal.gpus)
    lines = []
    for reason, strategies in list(reasons.items())[:SHOWN_ROWS]:
        alike: dict[tuple[int, ...], list[str]] = {}  # strategies by the numbers of GPUs that it holds them back on
        for strategy, refused in strategies.items():
            alike.setdefault(tuple(sorted(set(refused))), []).append(strategy)
        for counts, names in alike.items():
            where = f" on {', '.join(map(str, counts))} GPUs" if len(tried) > 1 else ""
            lines.append(TextLine(f"  {', '.join(names)}{where}: {reason}"))
    return [TextLine("\nwhat does not run", "bold"), *lines] if lines else []


def _ranked(leaders: list[Estimate]) -> TextTable:
    columns = (
        TableColumn("strategy"),
        TableColumn("mesh", keep=5),
        TableColumn("checkpointing", keep=7),
        TableColumn("micro-batch", "right", 7),
        TableColumn("batch", "right", 6),
        TableColumn("GiB expected", "right"),
        TableColumn("at most", "right", 4),
        TableColumn("tok/s/GPU", "right"),
        TableColumn("MFU", "right", 6),
        TableColumn("bound by", keep=3),
        TableColumn("fits", keep=8),
    )
    return TextTable(columns, tuple(_ranked_row(each) for each in leaders))


def _ranked_row(estimate: Estimate) -> tuple[str, ...]:
    setup, memory, time = estimate.setup, estimate.memory, estimate.time
    return (
        setup.plan.name,
        axes_text(setup),
        checkpointing_text(setup),
        f"{setup.micro_batch} × {setup.micro_batches}",
        f"{setup.global_batch:,}",
        f"{memory.expected_bytes / GIB:,.1f}",
        f"{memory.most_bytes / GIB:,.1f}",
        f"{time.tokens_per_s_per_gpu:,.0f}" if time else "",
        f"{time.mfu:.1%}" if time and time.mfu is not None else "n/a",
        time.bound_by if time else "",
        fits_text(memory) + ("" if estimate.runs_now else ", planned"),
    )
