"""One sharded model: its units, their schedule, and what can be asked of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.buckets.take_over import take_over_edits
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.dry_run.bill import MemoryBill
from terrazzo.engine.dry_run.promise import Promise
from terrazzo.engine.hooks.model_hooks import ModelHooks
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.model.description import described
from terrazzo.engine.model.drivers import Drivers
from terrazzo.engine.model.gathered_blocks import GatheredBlocks, Write
from terrazzo.engine.model.gradients import ModelGradients
from terrazzo.engine.model.requirements import Requirements
from terrazzo.engine.model.weight_average import Average
from terrazzo.engine.offload.store import Store
from terrazzo.engine.pipeline.pipeline_schedule import PipelineSchedule
from terrazzo.engine.pipeline.staged_step import StagedStep
from terrazzo.engine.pipeline.stages import Stages
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.progress.raised_passes import RaisedPasses
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.replicas.rounds import Rounds
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse
from terrazzo.marks import is_sharded
from terrazzo.processes.ending import require_own

__all__ = ["Engine", "engine_of", "find_engine", "is_sharded"]


@dataclass(kw_only=True, eq=False)
class Engine:
    """What `tz.shard` builds for a model.

    What is under way ends in these calls, from the least to the most. A word means the same in each class that has it:

        call               has come to its end                              asked by whoever
        await_states       writes of updates off the device to states       reads states of the optimizer
        await_scaling      scaling of gradients by such updates             clips, or asks `.grad`
        recover            a step that raised, and what it has updated      uses weights or param groups
        finish_publishing  new weights of a step on this thread             sends them again
        catch_up           every update: weights at rest follow masters     reads weights
        have_masters       the same, and what users have written is taken   reads master weights
        settle             all of these, every gather and every copy        saves, loads, gathers for a user

    It is whole once it is built, of what its arguments are and of parts that it makes of these; the model is not held.

    Attributes:
        sharding: the plan and the precision on this mesh.
        progress: what ranks compare of the training so far.
        tally: what has been sent, and transient memory held.
        units: in registration order, root first.
        why_units: how the units were found.
        hooks: what torch calls while the model runs, once they are attached to it.
        store: host memory and swap files of what does not rest on the device.
        stages: of the model that this rank runs; None for a whole one. `buffer_bytes`: of their buffers.
        staged_step: what runs these stages tells of a step; None for a whole model.
        drivers: one for each optimizer.
        process: that sharded the model.
        gradients: all of them, between backwards and steps.
        promise: what steps will need and send.
        blocks: of `tz.gathered`.
        rounds: of replicas that train by themselves; None where gradients are summed over them.
        average: of trained weights, where `tz.EMA` has begun one: checkpoints save it.
    """

    model: InitVar[nn.Module]
    sharding: ShardingSpec
    progress: Progress
    tally: Tally
    units: Sequence[Unit]
    why_units: str
    schedule: Schedule
    store: Store
    stages: Stages | None
    buffer_bytes: int
    drivers: Drivers = field(init=False)
    hooks: ModelHooks = field(init=False)
    staged_step: StagedStep | None = field(default=None, init=False)
    process: int = field(default_factory=os.getpid, init=False)
    gradients: ModelGradients = field(init=False)
    promise: Promise = field(init=False)
    blocks: GatheredBlocks = field(init=False)
    rounds: Rounds | None = field(default=None, init=False)
    average: Average | None = field(default=None, init=False)

    def __post_init__(self, model: nn.Module) -> None:
        """Build the parts, which must not hold the engine: a model is freed with the last who has it."""
        units, schedule = self.units, self.schedule
        drivers = self.drivers = Drivers(self.trainable(), self.progress)
        hooks = self.hooks = ModelHooks(model, units, schedule, self.sharding, self.progress, drivers)
        self.gradients = ModelGradients(self.trainable(), self.sharding, self.progress, schedule, hooks, drivers)
        if isinstance(schedule, PipelineSchedule):
            self.staged_step = StagedStep(schedule, hooks, self.progress.denominator, self.trainable())
        settings, templates = self.store.settings, lambda: drivers.templates
        self.promise = Promise(units, self.sharding, schedule, templates, settings, self.stages, self.buffer_bytes)
        if (diloco := self.sharding.diloco) is not None:
            trained = [buckets for unit in units if (buckets := list(unit.trainable()))]
            self.rounds = Rounds(diloco, trained, self.axes, self.tally)
        self.blocks = GatheredBlocks(units, schedule, hooks, self.axes, self.rounds)

    @property
    def plan(self) -> Plan:
        """The plan as asked for, in the mesh's axes; `sharding.plan` has only those with more than one rank."""
        return self.sharding.mesh_plan

    @property
    def axes(self) -> Axes:
        return self.sharding.axes

    @property
    def precision(self) -> Precision:
        return self.sharding.precision

    @property
    def raised(self) -> RaisedPasses:
        """What is known of passes that raised."""
        return self.hooks.raised

    @property
    def bill(self) -> MemoryBill:
        """Promised memory of a step with one micro-batch, in stages with the fewest."""
        return self.promise.memory()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that step the model, without those that nobody has any more."""
        return [driver.optimizer for driver in self.drivers.stepping()]

    @property
    def optimizer(self) -> Optimizer | None:
        """The first of its optimizers; None where nothing steps the model."""
        return next(iter(self.optimizers), None)

    def param_groups(self) -> list[tuple[int, dict[str, Any]]]:
        """The param groups of all optimizers, each with the number that `ParameterInfo.group` is."""
        return [
            pair
            for d in self.drivers.stepping()
            for pair in zip(d.groups.numbers, d.optimizer.param_groups, strict=True)
        ]

    def release_optimizer(self) -> None:
        """Let go of all optimizers, so that others can be attached; the old ones cannot step again. Collective."""
        self.settle()
        self.drivers.retire()

    def keep_average(self, average: Average) -> None:
        """Have an average of the trained weights from now on, in the bill too."""
        self.promise, self.average = replace(self.promise, averages=True), average

    @property
    def requires(self) -> Requirements:
        """What calls require of weights and states."""
        return Requirements(self.drivers, self.rounds, self.average)

    @property
    def averages(self) -> Mapping[Bucket, Buffer]:
        """Averages of each bucket's master weights; empty where there are none."""
        return {} if self.average is None else self.average.buffers

    def before_step(self) -> None:
        """Gradients are about to be used, and master weights to be changed: take over what users have done to them."""
        self.requires.own_weights("optimizer.step()")
        self.gradients.require_whole("optimizer.step()")
        self._take_over_edits()
        self.hooks.before_use()

    def begin_round(self) -> None:
        """Nothing refuses the step that comes: where it is the first of a round, note the weights of now. Collective.

        Raises:
            RanksApart: on every rank, where replicas have other weights.
        """
        if self.rounds is not None and self.rounds.begins:
            self.drivers.catch_up()
            self.rounds.begin()

    def after_step(self) -> None:
        """An optimizer has stepped: an outer step may be due, which after the last step of a round all weights take."""
        if self.rounds is not None and self.rounds.count_step():
            self.settle()
            self.publish(self.rounds.run())

    def restart_round(self) -> None:
        """Other weights have been loaded: replicas that train by themselves begin a round with these."""
        if self.rounds is not None:
            self.rounds.restart()

    def have_masters(self) -> None:
        """Have all in the master weights: what the user has written into weights, and what updates do to them."""
        self._take_over_edits()
        self.drivers.catch_up()

    def _take_over_edits(self) -> None:
        """Take over what the user has written into weights, once these are those of all steps that there were."""
        self.drivers.recover()
        take_over_edits(self.buckets())

    @property
    def traffic(self) -> Traffic:
        """Traffic that this rank has sent since the last `reset()`."""
        return self.tally.traffic

    @property
    def peak_transient_bytes(self) -> int:
        """The most transient memory held at once since sharding; the bill promises `transient_bytes`."""
        return self.tally.ledger.peak_bytes

    def state_bytes(self) -> int:
        """Weights, master weights and their averages, optimizer state and residuals on the device, measured."""
        resting = (each for bucket in self.buckets() for each in bucket.measured_at_rest())
        of_buckets = sum(each.nbytes for each in resting if each.tier == "device")
        on_device = [average for bucket, average in self.averages.items() if bucket.spec.tiers.optim == "device"]
        of_buckets += sum(average.nbytes for average in on_device)
        return of_buckets + sum(driver.state_bytes() for driver in self.drivers.stepping())

    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    def trainable(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets() if bucket.spec.trainable]

    def settle(self) -> None:
        """Return once every state is at rest, the last of these levels. Collective."""
        require_own(self.process)
        self.blocks.require_unwritten()
        self._take_over_edits()
        self.schedule.rest()
        self.catch_up()
        if (queued := Stream.current(self.axes.device).mark()) is not None:
            queued.synchronize()  # copies from host memory may still be under way

    def catch_up(self) -> None:
        """Return once no update is under way, and weights at rest are in line. Collective."""
        self.drivers.recover()
        for unit in self.units:
            unit.weights.finish_publishing()
        self.drivers.catch_up()

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Bring resting compute weights in line with the master weights; those that are being updated follow later.

        Args:
            among: the buckets whose masters have changed; all if None.
        """
        self.schedule.rest()
        for unit in (unit for unit in self.units if not unit.weights.updating):
            unit.weights.publish(among)
        self.blocks.show_changed()

    def gathered(self, write: Write) -> AbstractContextManager[dict[str, Tensor]]:
        """Full weights of the whole model; see `tz.gathered`."""
        what = f"tz.gathered(model, {write=})"
        self.requires.step_taken(what, reads="weights")
        if write:
            self.requires.own_weights(what)
        if write == "first rank":
            self.requires.round_ended(f"{what} came")
        return self.blocks.block(write, self.settle, self.publish)

    def close(self) -> None:
        """Remove swap files. States that were there cannot be used afterwards."""
        self.store.close()

    def describe(self) -> str:
        """The plan's places, the dtypes and the units, as text."""
        return described(self.sharding, self.units, self.why_units)


def find_engine(model: nn.Module) -> Engine | None:
    """The engine of a model, or None if it is not sharded; one that waits for it since `fully_shard` is sharded."""
    engine = getattr(model, "_terrazzo", None)
    return engine if isinstance(engine, Engine) else None


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model.

    Raises:
        Misuse: a model that is not sharded.
    """
    engine = find_engine(model)
    if engine is None:
        raise Misuse(f"This {type(model).__name__} is not sharded. Call tz.shard(model, optimizer, plan=...) first.")
    return engine
