"""A step of a model in stages, as what runs them tells the engine of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.gradient import Gradient
from terrazzo.engine.hooks.model_hooks import ModelHooks
from terrazzo.engine.pipeline.pipeline_schedule import PipelineSchedule
from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["DeferredGradient", "StagedStep"]


@dataclass(frozen=True)
class StagedStep:
    """What is told of each step: `under_way` around it, `turn_to` before each of its forwards and backwards.

    Such a step trains: one without gradients consists of forwards alone, and only their turns are told.
    """

    schedule: PipelineSchedule
    hooks: ModelHooks
    denominator: Denominator
    trainable: Sequence[Bucket]

    @property
    def agrees_in_passes(self) -> bool:
        """Whether ranks with the same stages wait for each other as passes end: their order is not agreed yet."""
        return not all(program.order.agreed for program in self.schedule.programs)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Micro-batches take turns inside. Where it raises, nothing goes on but the whole step, run again."""
        self.schedule.begin_micro_batches()
        try:
            yield
        except BaseException:
            self.schedule.zero_grad()
            self.hooks.raised.step_raised()
            raise

    def turn_to(self, chunk: int, ends_model: bool) -> None:
        """A forward or a backward of a chunk comes; `ends_model`: its output is the model's."""
        self.schedule.turn_to(chunk, ends_model)

    def gradient_received(self) -> None:
        """The backward that comes begins with a gradient from the next stage, which has the loss scale in it."""
        self.denominator.passes.note_scaled()

    def sum_gradients(self) -> None:
        """The step has been `under_way` to its end: sum over ranks what its micro-batches have added up. Collective."""
        self.hooks.complete(self.schedule.end_micro_batches())

    def deferrable(self) -> dict[Tensor, DeferredGradient]:
        """The gradient of each trained parameter, for those that are computed after their backward."""
        return {
            member.parameter: DeferredGradient(self.schedule, bucket.gradient, place)
            for bucket in self.trainable
            for place, member in enumerate(bucket.members)
        }


@dataclass(frozen=True)
class DeferredGradient:
    """The gradient of one parameter, to which its parts come after the backwards that they belong to."""

    _schedule: Schedule
    _gradient: Gradient
    _place: int

    @property
    def dtype(self) -> torch.dtype:
        """That of its parts."""
        return self._gradient.spec.compute_dtype

    def expect(self) -> None:
        """A part will come: have the memory from now on, as if the backward that runs had brought it."""
        self._gradient.begin(self._schedule.fate)

    def add(self, part: Tensor) -> None:
        """Add a part, with the parameter's shape."""
        self._gradient.add(self._place, part, self._schedule.fate)
