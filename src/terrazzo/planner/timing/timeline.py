"""When each stage of a pipeline runs what: the engine's own list of actions, with the seconds of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.parallel.pipeline.schedules import Action, ActionKind, actions_of
from terrazzo.planner.layout.placement import stand_ins
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.pipeline_rank import PipelineRank

__all__ = ["Span", "Timeline", "pipeline_step", "timeline_of"]


@dataclass(frozen=True)
class Span:
    """When one stage runs on one micro-batch, in seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step, without what comes behind its last backward.

    Attributes:
        ranks: what each rank along the pipeline runs, in its order.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        return max(spans[-1].end_s for spans in self.ranks)

    def idle_share(self, rank: int) -> float:
        """The part of the step in which a rank runs nothing."""
        return 1 - sum(span.end_s - span.start_s for span in self.ranks[rank]) / self.seconds


def pipeline_step(setup: Setup, pace: float = 1.0) -> Timeline:
    """A step of a pipeline whose device and links are known, without data-parallel communication and the update.

    Args:
        pace: by how much longer computation takes here than the device's figures say.

    Raises:
        BadInput: micro-batches that do not fill the pipeline, or do not go round.
    """
    made = {pp_rank: PipelineRank(setup, pp_rank, pace) for pp_rank in set(stand_ins(setup))}
    ranks = [made[pp_rank] for pp_rank in stand_ins(setup)]
    return timeline_of(setup.pipeline, setup.micro_batches, [rank.passes for rank in ranks], ranks[0].send_s)


def timeline_of(
    schedule: str,
    micro_batches: int,
    passes: Sequence[Sequence[tuple[float, float]]],
    send_s: float = 0.0,
) -> Timeline:
    """Have each rank run its actions as soon as it has ended the one before, and what it is given has come.

    Args:
        passes: seconds of one micro-batch, for each rank and each of its stages: `PassSeconds`, or such a pair.
        send_s: from the end of a stage's pass until the next stage has what it made; the sender goes on meanwhile.

    Raises:
        BadInput: a schedule that does not exist, or does not go with so many ranks, chunks and micro-batches.
    """
    ranks, chunks = len(passes), len(passes[0])
    orders = actions_of(schedule, ranks, chunks, micro_batches)
    last_stage = ranks * chunks - 1
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    while any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        for done, order, own in zip(spans, orders, passes, strict=True):
            while len(done) < len(order):
                action = order[len(done)]
                before = _before(action, last_stage)
                if before is not None and before not in ended:
                    break
                arrived = 0.0 if before is None else ended[before] + send_s * (before.stage != action.stage)
                start = max(arrived, done[-1].end_s if done else 0.0)
                ended[action] = start + _seconds(action, own[action.stage // ranks], schedule)
                done.append(Span(action, start, ended[action]))
    return Timeline(tuple(map(tuple, spans)))


def _seconds(action: Action, passes: tuple[float, float], schedule: str) -> float:
    """Seconds of an action. Gradients of weights that are put off take half of a backward (arXiv 2401.10241, 2)."""
    forward_s, backward_s = passes
    if action.kind is ActionKind.FORWARD:
        return forward_s
    return backward_s / 2 if schedule == "zero_bubble" else backward_s


def _before(action: Action, last_stage: int) -> Action | None:
    """The action whose result this one needs; None for the first forward of a micro-batch."""
    stage, kind, number = action
    if kind is ActionKind.WEIGHT:
        return Action(stage, ActionKind.BACKWARD, number)
    if kind is ActionKind.FORWARD:
        return Action(stage - 1, kind, number) if stage else None
    return Action(stage, ActionKind.FORWARD, number) if stage == last_stage else Action(stage + 1, kind, number)
