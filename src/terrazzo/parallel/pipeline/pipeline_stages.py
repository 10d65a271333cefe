"""The stages that a model is cut into, which of them this rank has, and how far a forward has come along the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from terrazzo.engine import Stages
from terrazzo.engine.pipeline.stages import Turn
from terrazzo.parallel.pipeline.schedules import Action, ActionKind, actions_of

__all__ = ["PipelineStages"]


@dataclass(frozen=True)
class PipelineStages(Stages):
    """A model's line, the modules through which its values go one after the other, cut into stages.

    Attributes:
        line: names of the modules, in the order in which the forward calls them.
        bounds: the half-open interval of the line that each stage is.
        schedule: that of `Pipeline`.
        tied: names of parameters that the model uses again behind its last module, in the last stage.
        running: the forward that runs now.
    """

    line: tuple[str, ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    schedule: str = "1f1b"
    tied: tuple[str, ...] = ()
    running: RunningForward = field(default_factory=lambda: RunningForward(), compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStages:
        copied = PipelineStages(self.ranks, self.rank, self.chunks, self.line, self.bounds, self.schedule, self.tied)
        memo[id(self)] = copied
        return copied

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """What this rank does in a step.

        Raises:
            BadInput: too few micro-batches.
        """
        return actions_of(self.schedule, self.ranks, len(self.chunks), micro_batches)[self.rank]

    def turns(self, micro_batches: int) -> Sequence[Turn]:
        return [
            Turn(each.stage // self.ranks, each.kind is ActionKind.FORWARD, self.is_last(each.stage))
            for each in self.actions(micro_batches)
            if each.kind is not ActionKind.WEIGHT
        ]

    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        places = [place for place, module in enumerate(self.line) if any(n.startswith(f"{module}.") for n in names)]
        stages = {stage for stage, (begin, end) in enumerate(self.bounds) for place in places if begin <= place < end}
        if any(name in self.tied for name in names):
            stages.add(len(self.bounds) - 1)
        return tuple(sorted({stage % self.ranks for stage in stages}))

    def runs(self, module: str) -> bool:
        return bool(self.chunks_of(module)) if self.has(module) else self.rank == self.ranks - 1

    def has(self, module: str) -> bool:
        return any(f"{module}.".startswith(f"{name}.") for name in self.line)

    def is_last(self, stage: int) -> bool:
        return stage == len(self.bounds) - 1

    def enter(self, stage: int, received: Tensor | None) -> None:
        """Begin a forward of `stage`, whose input, from the stage before, is `received`."""
        self.running.begin(stage, received)

    def leave(self) -> None:
        """End the forward."""
        self.running.end()


@dataclass
class RunningForward:
    """The forward that runs now.

    Attributes:
        stage: its stage; None where no forward runs.
        come_to: how many modules of the line it has called.
        received: its input, from the stage before.
        values: the output of the module that it called last.
        version: how often that output had been changed in place when it was returned.
    """

    stage: int | None = None
    come_to: int = 0
    received: Any = None
    values: Any = None
    version: int = 0

    def begin(self, stage: int, received: Tensor | None) -> None:
        self.stage, self.come_to, self.received = stage, 0, received
        self.values = None

    def end(self) -> None:
        self.stage = self.received = self.values = None
