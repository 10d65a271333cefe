"""What steps one model: the drivers of its optimizers, put on it and let go of here alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.progress.loss_scale import LossScale
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.runtime.calls import do_nothing

__all__ = ["Drivers"]


class Drivers:
    """The drivers of a model's optimizers, in the order in which these have come. None is in it to begin with.

    Param groups of all optimizers are numbered one after the other; `ParameterInfo.group` is such a number.

    Args:
        buckets: the model's trainable ones.
        progress: follows what is driven.
    """

    def __init__(self, buckets: Sequence[Bucket], progress: Progress) -> None:
        self._buckets, self._progress = buckets, progress
        self._drivers: list[OptimizerDriver] = []
        self._templates: Templates = ()
        self._added: Callable[[Optimizer], None] = do_nothing

    def __iter__(self) -> Iterator[OptimizerDriver]:
        return iter(self._drivers)

    def __len__(self) -> int:
        return len(self._drivers)

    @property
    def templates(self) -> Templates:
        """The templates of all param groups, in the order of their numbers."""
        return self._templates

    @property
    def next_group(self) -> int:
        """The number that the first param group of the next optimizer gets."""
        return len(self._templates)

    def add(self, driver: OptimizerDriver, templates: Templates) -> None:
        """Have another one, whose optimizer is ready to step.

        Args:
            templates: what is kept for a parameter of each of its param groups.
        """
        self._drivers.append(driver)
        self._templates = [*self._templates, *templates]
        self._progress.denominator.scale_by(driver.loss_scale)
        self._added(driver.optimizer)

    def on_added(self, call: Callable[[Optimizer], None]) -> None:
        """Have `call` called with each optimizer that is put on the model from now on."""
        self._added = call

    def stepping(self) -> list[OptimizerDriver]:
        """Drivers whose optimizer is alive; after `drop_gone`, whose optimizer somebody has."""
        return [driver for driver in self._drivers if driver.reference() is not None]

    def catch_up(self) -> None:
        """Return once no update of any is under way, and weights at rest are in line."""
        for driver in self._drivers:
            driver.catch_up()

    def recover(self) -> None:
        """Steps that raised have ended: groups of their optimizers hold the model's parameters again, and all weights
        are in line with what those steps have updated. Called before anything uses either. Collective where one has.
        """
        for driver in self._drivers:
            driver.recover()

    def before_forward(self, unit: int) -> None:
        """A forward of a unit begins; see `OffDeviceUpdates.before_forward`."""
        for driver in self._drivers:
            driver.off_device.before_forward(unit)

    def retire(self) -> None:
        """Let go of all optimizers; nothing may be under way."""
        for driver in self._drivers:
            driver.retire()
        self._drivers = []
        self._progress.hyper_parameters.clear()
        self._progress.denominator.scale_by(LossScale())
        self.drop_gone()

    def drop_gone(self, alive: Collection[Optimizer] = ()) -> None:
        """Let go of optimizers that nobody has any more: their parameters can get another one.

        That is so at the same call on every rank: what only a cycle of objects holds is collected here, not at a time
        that the collector chooses.

        Args:
            alive: those that the caller has. If they are all, nothing has to be collected.
        """
        if any(driver.optimizer not in alive for driver in self.stepping()):
            gc.collect()
        self._drivers = self.stepping()
        stepped_groups = {number for driver in self._drivers for number in driver.groups.numbers}
        for bucket in self._buckets:
            for member in bucket.members:
                if member.group not in stepped_groups:
                    member.group = -1
        if not self._drivers:
            self._templates = ()
