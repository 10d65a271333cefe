"""All gradients of one model, between its backwards and its optimizers' steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.hooks.model_hooks import ModelHooks
from terrazzo.engine.optim.clipping import clip_grad_norm
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.zeroing import note_zeroed
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse

__all__ = ["ModelGradients"]


@dataclass(frozen=True)
class ModelGradients:
    """The gradients of one model's trainable buckets, and what follows them where they change.

    Attributes:
        drivers: of the model's optimizers, as there are at the time.
    """

    buckets: Sequence[Bucket]
    sharding: ShardingSpec
    progress: Progress
    schedule: Schedule
    hooks: ModelHooks
    drivers: Iterable[OptimizerDriver]

    @property
    def finished(self) -> bool:
        """Whether there is a gradient that a step would take."""
        return any(bucket.gradient.finished.exists for bucket in self.buckets)

    @property
    def awaits_step(self) -> bool:
        """Whether any have been divided, and no step has taken them: of parameters that an optimizer has, if any has
        one.
        """
        stepping = [driver for driver in self.drivers if driver.reference() is not None]
        return any(driver.awaits_step for driver in stepping) if stepping else self.finished

    def zero(self, set_to_none: bool) -> None:
        """Forget every gradient, or set finished ones to zero."""
        note_zeroed(self.buckets, self.schedule, self.progress, self.hooks.raised, set_to_none)
        for driver in self.drivers:
            driver.forget(set_to_none)
        self.schedule.zero_grad(set_to_none)

    def require_whole(self, what: str) -> None:
        """Refuse `what` where a backward has raised, or is running: each plan has another part of its gradients.

        Raises:
            Misuse: there.
        """
        if self.schedule.backward is not None or self.hooks.raised.abandoned:
            raise Misuse(
                f"{what} was called after a backward that raised, or inside of one: a part of the parameters have "
                "gradients, and the others have none. Call optimizer.zero_grad() instead, or leave it out, and run "
                "forward and backward of the whole step again."
            )

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See `tz.clip_grad_norm_`."""
        self.require_whole("tz.clip_grad_norm_")
        if any(bucket.gradient.unfinished for bucket in self.buckets):
            raise Misuse(
                "tz.clip_grad_norm_ was called while gradients were still being accumulated. Run the last "
                "micro-batch's backward outside 'with tz.accumulate(model)' first."
            )
        self.hooks.before_use()
        self.progress.note(f"tz.clip_grad_norm_(model, {float(max_norm)}, {float(norm_type)})")
        for driver in self.drivers:
            driver.off_device.prepare_clipping(max_norm)
        with self.sharding.axes.tally.phases.during("clip"):
            return clip_grad_norm(self.buckets, self.sharding, max_norm, norm_type, error_if_nonfinite)
