"""All ranks along pp in one step: the terms of the one that ends last, and what it waits for the others.

Where gradients are clipped by their norm, or checked for a loss scale, no rank begins its update before all have summed
theirs: then the step ends with the longest update, whichever rank's it is.
"""

from __future__ import annotations

from functools import cached_property

from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.placement import placed_units
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.pipeline_rank import PipelineRank
from terrazzo.planner.timing.timeline import StageSchedule, Timeline, idle_of_equal_stages

__all__ = ["FORMULAS", "PipelineStep", "bubble_of_equal_stages"]

FORMULAS = {
    "time.bubble": Formula(
        "played_s - busy_s; of the rank whose step ends last, played_s when its last backward ends if each rank runs "
        "its actions as soon as what they need is there, with what each stage takes; of equal stages and full rounds "
        "busy_s * (1 + (pp - 1) / (virtual_stages * micro_batches)), a third of the share under zero_bubble",
        "terrazzo/parallel/pipeline/schedules.py; arXiv 2104.04473 section 2.2; arXiv 2401.10241 table 2",
    ),
    "time.send": Formula(
        "with_messages_s - played_s; with_messages_s as played_s, where a stage is given send_s later what another one "
        "made; send_s is bytes / bandwidth, and a call",
        "terrazzo/parallel/pipeline/schedules.py; arXiv 2104.04473 section 4.1",
    ),
}


class PipelineStep:
    """A step of all ranks along pp, of which there may be one. The device's rates and links must be known.

    Args:
        pace, waits: see `PipelineRank`.

    Attributes:
        ranks: each rank along pp; ranks that do the same are one object.
    """

    def __init__(self, setup: Setup, pace: float = 1.0, waits: bool = True) -> None:
        self.setup, self._schedule = setup, StageSchedule.of(setup)
        ranks, made = list[PipelineRank](), dict[object, PipelineRank]()
        for pp_rank in range(setup.mesh.pp):
            alike = placed_units(setup, pp_rank), pp_rank == 0, pp_rank == setup.mesh.pp - 1
            if alike not in made:
                made[alike] = PipelineRank(setup, pp_rank, pace, waits)
            ranks.append(made[alike])
        self.ranks = tuple(ranks)

    @property
    def slowest(self) -> PipelineRank:
        """The rank that ends last: with its last turn, what it sums then, and where none waits for all, its update."""
        return self.ranks[self._slowest_at]

    @property
    def _update_terms(self) -> list[Term]:
        """Of the update that ends last."""
        if not self._updates_at_once:
            return self.slowest.update_terms
        return max(self.ranks, key=lambda rank: rank.update_s).update_terms

    @property
    def _updates_at_once(self) -> bool:
        return self.setup.framework.clip or self.setup.precision.loss_scaling is not None

    @cached_property
    def _slowest_at(self) -> int:
        """Where it is along pp."""
        if len(self.ranks) == 1:
            return 0
        ends = [end_s + rank.summed_s for end_s, rank in zip(self._ends, self.ranks, strict=True)]
        if not self._updates_at_once:
            ends = [end_s + rank.update_s for end_s, rank in zip(ends, self.ranks, strict=True)]
        return ends.index(max(ends))

    @cached_property
    def _ends(self) -> list[float]:
        """When each rank has ended its last turn."""
        return self._ends_with(self._send_s)

    def _ends_with(self, send_s: float) -> list[float]:
        return self._schedule.ends_of_ranks([rank.passes for rank in self.ranks], send_s)

    @property
    def timeline(self) -> Timeline:
        """When each rank runs what, without data-parallel communication and the update."""
        return self._schedule.timeline([rank.passes for rank in self.ranks], self._send_s)

    def terms(self) -> list[Term]:
        """The terms of the step; they add up to it, but for what ranks wait for cores that they share."""
        slowest = self.slowest
        waiting = self._waiting() if len(self.ranks) > 1 else []
        return [term for term in (*slowest.pass_terms(), *waiting, *self._update_terms) if term.value]

    def _waiting(self) -> list[Term]:
        """What the slowest rank waits for the others until its last turn, and for messages on their way."""
        played_s, with_messages_s = (ends[self._slowest_at] for ends in (self._ends_with(0.0), self._ends))
        sent_s = max(0.0, with_messages_s - played_s)
        inputs = {"with_messages_s": with_messages_s, "played_s": played_s, "send_s": self._send_s}
        sent = Term.seconds("pipeline communication", sent_s, "time.send", **inputs)
        return [sent, _bubble(self.setup, self.slowest.busy_s, played_s)]

    @property
    def _send_s(self) -> float:
        """Seconds of a message; the first rank sends as long ones as all others."""
        return self.ranks[0].send_s


def bubble_of_equal_stages(setup: Setup, busy_s: float) -> Term:
    """What a step takes longer in a pipeline of which nothing is known but what a rank computes, `busy_s`."""
    return _bubble(setup, busy_s, busy_s * (1 + idle_of_equal_stages(setup)))


def _bubble(setup: Setup, busy_s: float, played_s: float) -> Term:
    schedule = {"pp": setup.mesh.pp, "micro_batches": setup.micro_batches, "virtual_stages": setup.virtual_stages}
    idle_s = max(0.0, played_s - busy_s)
    return Term(
        "pipeline bubble", idle_s, idle_s, "time.bubble", {"busy_s": busy_s, "played_s": played_s, **schedule}, "s"
    )
