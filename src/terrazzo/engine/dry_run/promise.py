"""What steps of a sharded model will need and send, asked of it by the numbers of their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.dry_run.bill import MemoryBill, memory_bill
from terrazzo.engine.dry_run.outer_steps import dry_run_fragments, dry_run_outer_step
from terrazzo.engine.dry_run.step import StepSpec, dry_run
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.pipeline.stages import Stages
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["Promise"]


@dataclass(frozen=True)
class Promise:
    """Memory and traffic that a step will take on this rank, before it runs.

    Before the first forward nobody knows in which order units run, nor how often: the promise is for the order of
    registration, and once ranks have agreed on what they ran, for that. Nor does anybody know whether an input requires
    gradients. If one does, backward comes also to units that are frozen and in front of all that is trained: they are
    promised from the second step on.

    Attributes:
        sharding: of the model; a bucket may follow its own family's.
        templates: gives what is kept for a parameter of each param group.
        stages: of the model that this rank runs; None for a whole one. `buffer_bytes`: of their buffers.
        averages: whether there is an average of the weights.
    """

    units: Sequence[UnitLayout]
    sharding: ShardingSpec
    schedule: Schedule
    templates: Callable[[], Templates]
    offload: Offload
    stages: Stages | None
    buffer_bytes: int
    averages: bool = False

    def memory(self, micro_batches: int | None = None, local: bool | None = None) -> MemoryBill:
        """Promised memory of a step.

        Args:
            micro_batches: in the step; by default the fewest: one, or of a model in stages one for each rank that has
                some.
            local: as for `tz.accumulate`.

        Raises:
            BadInput: too few micro-batches for a pipeline.
        """
        step = self._step(micro_batches, local)
        return memory_bill(self.units, self.templates(), self.offload, step, averages=self.averages)

    def traffic(
        self, micro_batches: int | None = None, local: bool | None = None, *, ends_round: bool = False
    ) -> Traffic:
        """Traffic of one step from this rank, in exact counts and bytes; clipping adds its one scalar per rank.

        What modules send of activations, and stages each other, is beside this: see `Traffic`. So is what `tz.step`
        compares of its arguments.

        Args:
            micro_batches, local: as for `memory`.
            ends_round: with the outer step that comes after it, where replicas train by themselves.
        """
        sent = dry_run(self.units, self._step(micro_batches, local), self.templates()).traffic
        if ends_round:
            _add(sent, dry_run_outer_step(self.units).traffic)
        return sent

    @property
    def round_steps(self) -> int:
        """Optimizer steps of a round of replicas that train by themselves; 1 where there are none."""
        return 1 if self.sharding.diloco is None else self.sharding.diloco.round_steps

    def round_traffic(self, micro_batches: int | None = None, local: bool | None = None) -> Traffic:
        """Traffic of all steps of a round from this rank, and of its outer steps.

        Args:
            micro_batches, local: as for `memory`.
        """
        sent, of_step = self.outer_traffic(), self.traffic(micro_batches, local)
        for _ in range(self.round_steps):
            _add(sent, of_step)
        return sent

    def outer_traffic(self) -> Traffic:
        """Traffic of a round from this rank, beside `traffic` of its steps; see `DiLoCo`.

        It is of the outer step in the round's last one, but for its "control", which is of the first; and of those of
        fragments within the round.
        """
        sent, settings = dry_run_outer_step(self.units).traffic, self.sharding.diloco
        fragments = dry_run_fragments(self.units)
        for number in settings.exchanged_in_round() if settings is not None and fragments else ():
            _add(sent, fragments[number].traffic)
        return sent

    def _step(self, micro_batches: int | None, local: bool | None) -> StepSpec:
        orders = [program.order for program in self.schedule.programs]
        if micro_batches is None:
            return StepSpec.least(self.schedule.prefetch, self.stages, self.buffer_bytes, orders)
        adds = self.stages is not None or self.sharding.fate_of(last=False, local=local) is GradientFate.LOCAL
        return StepSpec(self.schedule.prefetch, micro_batches, adds, self.stages, self.buffer_bytes, orders=orders)


def _add(sent: Traffic, more: Traffic) -> None:
    sent.count.update(more.count)
    sent.bytes.update(more.bytes)
