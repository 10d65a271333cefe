"""One sharded model: its units, their schedule, and what can be asked of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.ending import require_own
from terrazzo.engine.buckets.bucket import Bucket, adopt_displaced
from terrazzo.engine.buckets.buffer import Buffer
from terrazzo.engine.buckets.unit import Unit, adopt_edits
from terrazzo.engine.links.tally import Tally
from terrazzo.engine.links.traffic import Traffic
from terrazzo.engine.loop.hooks import Hooks
from terrazzo.engine.loop.progress import Progress
from terrazzo.engine.model.alike import broadcast_first, compare_written
from terrazzo.engine.model.average import Average
from terrazzo.engine.model.description import described
from terrazzo.engine.model.drivers import Drivers
from terrazzo.engine.offload.store import Store
from terrazzo.engine.optim.clipping import clip_grad_norm
from terrazzo.engine.paper.bill import MemoryBill, memory_bill
from terrazzo.engine.paper.rehearsal import PaperStep, rehearse
from terrazzo.engine.plan.axes import Axes
from terrazzo.engine.plan.elsewhere import Stages
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.recipe import Recipe
from terrazzo.engine.plan.spec import Pass
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import BadInput, Misuse

__all__ = ["Engine", "engine_of"]


_INSIDE = (
    "A forward, load_state_dict() or another call that moves weights came inside 'with tz.gathered(model, "
    "write=True):', under a plan that splits them: what has been written would be lost. End the block before it."
)


@dataclass(kw_only=True)
class Engine:
    """What `tz.shard` builds behind a model.

    It becomes quiet at two levels. A word means the same in each class that has it:

        catch_up    No update of master weights is under way, and weights at rest are in line with them. Gathered
                    weights stay. Drivers and units do so, too; of a unit, `finish_publishing` is the half that does not
                    wait for an update away from the device.
        settle      All of that, and what users have written is taken over; nothing is gathered, and no copy is queued.

    Attributes:
        plan: as asked for, in the mesh's axes.
        recipe: the same with only the axes that have more than one rank, and the precision.
        progress: what ranks compare of the training so far.
        tally: what has been sent, and transient memory held.
        units: in registration order, root first.
        why_units: how the units were found.
        store: memory and files of what does not rest on the device.
        stages: of the model that this rank runs; None for a whole one.
        drivers: one for each optimizer.
        process: that sharded the model.
    """

    plan: Plan
    recipe: Recipe
    progress: Progress
    tally: Tally
    units: Sequence[Unit]
    why_units: str
    schedule: Schedule
    hooks: Hooks
    store: Store
    stages: Stages | None = None
    drivers: Drivers = field(init=False)
    process: int = field(default_factory=os.getpid, init=False)
    _average: Average | None = field(default=None, init=False)
    _gathered: Literal["read", "write"] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.drivers = Drivers(self.trainable(), self.progress)

    @property
    def axes(self) -> Axes:
        return self.recipe.axes

    @property
    def precision(self) -> Precision:
        return self.recipe.precision

    @property
    def bill(self) -> MemoryBill:
        """Promised memory of a step with one micro-batch, in stages with the fewest; see `memory_bill`."""
        return self.memory_bill(1 if self.stages is None else self.stages.ranks)

    @property
    def optimizers(self) -> list[Optimizer]:
        """What steps the model, without those that nobody has any more."""
        return [driver.optimizer for driver in self.drivers.stepping()]

    @property
    def optimizer(self) -> Optimizer | None:
        """The first of its optimizers; None where nothing steps the model."""
        return next(iter(self.optimizers), None)

    def param_groups(self) -> list[tuple[int, dict[str, Any]]]:
        """The param groups of all optimizers, each with the number that `ParameterInfo.group` is."""
        return [pair for d in self.drivers.stepping() for pair in zip(d.groups, d.optimizer.param_groups, strict=True)]

    def release_optimizer(self) -> None:
        """Let go of all optimizers, so that others can be attached; the old ones cannot step again. Collective."""
        self.settle()
        self.drivers.retire()

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget every gradient, or set finished ones to zero."""
        self.note_zeroed(set_to_none)
        for driver in self.drivers:
            driver.forget(set_to_none)
        self.schedule.forget_gradients(set_to_none)

    def note_zeroed(self, set_to_none: bool, first: int = 0) -> None:
        """Gradients are about to be forgotten, or set to zero: on every rank, where there are any.

        Args:
            first: number of the first param group of the optimizer that does so.
        """
        progress, which = self.progress, "" if set_to_none else "set_to_none=False"
        failed = progress.failed or self.schedule.backward is not None
        if not (set_to_none or failed) and any(bucket.gradient.unfinished for bucket in self.trainable()):
            raise Misuse(
                "zero_grad(set_to_none=False) was called while gradients were still being accumulated: there are none "
                "yet to be zeros that a step would use. Call zero_grad() instead, or run the last micro-batch's "
                "backward outside 'with tz.accumulate(model)' first."
            )
        if failed or any(bucket.gradient.exists for bucket in self.trainable()):
            progress.note(f"zero_grad({which})" + (f" of param group {first} and on" if first else ""))
        progress.forget_gradients()

    def require_own_weights(self, what: str) -> None:
        """Refuse `what` where the averages are in the place of the weights.

        Raises:
            Misuse: there.
        """
        if self.average is not None and self.average.swapped:
            raise Misuse(
                f"{what} inside 'with ema.swapped():', where the model's weights are the average: call it outside."
            )

    @property
    def average(self) -> Average | None:
        """Of trained weights, where `tz.EMA` has begun one."""
        return self._average

    def keep_average(self, average: Average) -> None:
        """Have checkpoints save that average, and steps refuse to train it."""
        self._average = average

    @property
    def averages(self) -> Mapping[Bucket, Buffer]:
        """Averages of each bucket's master weights; empty where there is none."""
        return {} if self.average is None else self.average.buffers

    def prepare_step(self) -> None:
        """Gradients are about to be used, and master weights to be changed: take over what users have done to them."""
        self.require_own_weights("optimizer.step()")
        self._require_whole_gradients("optimizer.step()")
        adopt_edits(self.units)
        self.hooks.before_use()

    def _require_whole_gradients(self, what: str) -> None:
        """Refuse `what` where a backward has raised, or is running: each plan has another part of its gradients.

        Raises:
            Misuse: there.
        """
        if self.schedule.backward is not None or self.progress.abandoned:
            raise Misuse(
                f"{what} was called after a backward that raised, or inside of one: a part of the parameters have "
                "gradients, and the others have none. Call optimizer.zero_grad() instead, or leave it out, and run "
                "forward and backward of the whole step again."
            )

    def have_masters(self) -> None:
        """Have all in the master weights: what the user has written into weights, and what updates do to them."""
        adopt_edits(self.units)
        self.drivers.catch_up()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See `tz.clip_grad_norm_`."""
        self._require_whole_gradients("tz.clip_grad_norm_")
        if any(bucket.gradient.unfinished for bucket in self.trainable()):
            raise Misuse(
                "tz.clip_grad_norm_ was called while gradients were still being accumulated. Run the last "
                "micro-batch's backward outside 'with tz.accumulate(model)' first."
            )
        self.hooks.before_use()
        self.progress.note(f"tz.clip_grad_norm_(model, {float(max_norm)}, {float(norm_type)})")
        for driver in self.drivers:
            driver.prepare_clipping(max_norm)
        with self.tally.phases.during("clip"):
            return clip_grad_norm(self.trainable(), self.recipe, max_norm, norm_type, error_if_nonfinite)

    def memory_bill(self, micro_batches: int = 1, local: bool | None = None) -> MemoryBill:
        """Promised memory of a step.

        Args:
            micro_batches: in the step; of a model in stages at least as many as ranks have some.
            local: as for `tz.accumulate`.

        Raises:
            BadInput: too few micro-batches for a pipeline.
        """
        return memory_bill(
            self.units, self.drivers.templates, self.store.settings, self._paper_step(micro_batches, local)
        )

    def _paper_step(self, micro_batches: int, local: bool | None) -> PaperStep:
        adds = self.stages is not None or self.pass_of(False, local) is Pass.ADDS
        return PaperStep(self.schedule.prefetch, micro_batches, adds, self.stages)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since the last `reset()`."""
        return self.tally.traffic

    @property
    def peak_transient_bytes(self) -> int:
        """The most transient memory held at once since sharding; the bill promises `transient_bytes`."""
        return self.tally.ledger.peak_bytes

    def usage(self) -> dict[str, float]:
        """What lies beside the device, in bytes, and what has been done there: see `Store.usage`."""
        return self.store.usage()

    def state_bytes(self) -> int:
        """Weights, master weights and optimizer state on the device, measured."""
        buckets = self.buckets()
        held = [bucket.weight.nbytes for bucket in buckets if bucket.tiers.weight == "device"]
        held += [bucket.master.nbytes for bucket in buckets if bucket.has_own_master and not bucket.updated_off_device]
        return sum(held) + sum(driver.state_bytes() for driver in self.drivers.stepping())

    def buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    def trainable(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets() if bucket.trainable]

    @property
    def has_gradients(self) -> bool:
        """Whether there is a gradient that a step would take."""
        return any(bucket.gradient.finished is not None for bucket in self.trainable())

    def pass_of(self, last: bool, local: bool | None = None) -> Pass:
        """What becomes of the gradients of a step's last micro-batch, or of another; see `tz.accumulate` for `local`.

        Default by plan: where `grad` is not split, sums stay local, which sends fewer bytes; where it is split, each
        micro-batch is reduced, which keeps less memory.
        """
        if last:
            return Pass.FINISHES
        if local is False and not self.plan.grad.axes:
            raise BadInput(
                f"tz.accumulate(local=False) asks to reduce each micro-batch, but plan {self.plan.name} keeps whole "
                "gradients on every rank. Leave 'local' out, or use zero2."
            )
        return Pass.ADDS if local or not self.recipe.plan.grad.axes else Pass.REDUCES

    def settle(self) -> None:
        """Return once every state is at rest, the second level. Collective."""
        require_own(self.process)
        if self._gathered == "write" and any(unit.transient for unit in self.units):
            raise Misuse(_INSIDE)
        adopt_edits(self.units)
        self.schedule.rest()
        self.catch_up()
        if (queued := Stream.current(self.axes.device).mark()) is not None:
            queued.synchronize()  # copies from host memory may still be under way

    def catch_up(self) -> None:
        """Return once no update is under way, the first level. Collective."""
        self.drivers.restore_groups()
        self._finish_publishing()
        self.drivers.catch_up()

    def _finish_publishing(self) -> None:
        for unit in self.units:
            unit.finish_publishing()

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Bring resting compute weights in line with the master weights; those that are being updated follow later.

        Args:
            among: the buckets whose masters have changed; all if None.
        """
        self.schedule.rest()
        for unit in (unit for unit in self.units if not unit.updating):
            unit.publish(among)
        if self.axes.side is None:
            self._finish_publishing()
        self.show_changed()

    def show_changed(self) -> None:
        """Weights at rest have changed: inside a `gathered` that only reads, full ones follow. Collective."""
        if self._gathered == "read":
            self.schedule.gather_all()

    def expected_traffic(self, micro_batches: int = 1, local: bool | None = None) -> Traffic:
        """What one step sends from this rank, in exact counts and bytes; clipping adds its one scalar per rank.

        What modules send of activations, and stages each other, is beside this: see `Traffic`.

        Args:
            micro_batches: in the step.
            local: as for `tz.accumulate`.
        """
        return rehearse(self.units, self._paper_step(micro_batches, local)).traffic

    @contextlib.contextmanager
    def gathered(self, write: bool | Literal["first rank"]) -> Iterator[dict[str, Tensor]]:
        """Full weights of the whole model; see `tz.gathered`."""
        outer = self._gathered
        members = [member for bucket in self.buckets() for member in bucket.members]
        named: dict[str, Tensor] = {name: member.parameter for member in members for name in member.names}
        if outer is not None and (outer == "write" or not write) and all(unit.present for unit in self.units):
            yield named  # who began takes over what is written
            if write == "first rank":
                self._agree_on_written(write)
            return
        self.settle()
        for bucket in self.buckets():
            bucket.refuse_lost_edits()  # through views that have been kept
        self.schedule.gather_all()
        self._within("write" if write else "read")
        try:
            yield named
            with torch.no_grad():
                if write:
                    self._agree_on_written(write)
                for bucket in self.buckets() if write else ():
                    bucket.adopt_written()
        except BaseException:
            for bucket in self.buckets():
                bucket.forget_edits()
            if outer is not None:  # whose weights have what was written
                self.schedule.gather_all()
            raise
        finally:
            self._within(outer)
            if outer is None:
                for bucket in self.buckets():
                    bucket.free_storage()
            self.schedule.rest()
        if write:
            self.publish()

    @torch.no_grad()
    def _agree_on_written(self, write: Literal[True, "first rank"]) -> None:
        """Compare what ranks have written into gathered weights, or take what the first one has."""
        buckets = self.buckets()
        adopt_displaced(buckets)
        broadcast_first(buckets) if write == "first rank" else compare_written(self.axes, buckets)

    def _within(self, gathered: Literal["read", "write"] | None) -> None:
        self._gathered = gathered
        self.hooks.refuse_forwards(_INSIDE if gathered == "write" else None)
        for bucket in self.buckets():
            bucket.pinned = gathered == "read"

    def close(self) -> None:
        """Remove what is in files. States that were there cannot be used afterwards."""
        self.store.close()

    def describe(self) -> str:
        """The plan's places, the dtypes and the units, as text."""
        return described(self.plan, self.recipe, self.units, self.why_units)


def engine_of(model: nn.Module) -> Engine:
    """The engine behind a sharded model.

    Raises:
        Misuse: a model that is not sharded.
    """
    engine = getattr(model, "_terrazzo", None)
    if not isinstance(engine, Engine):
        raise Misuse(f"This {type(model).__name__} is not sharded. Call tz.shard(model, optimizer, plan=...) first.")
    return engine
