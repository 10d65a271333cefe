"""What calls on a sharded model require of its weights and states: refused where these are not those after a step.

    call                         own_weights     step_taken                                 round_ended
    optimizer.step()             yes             by `OffDeviceUpdates.before_step`
    optimizer.state_dict()       yes             of states
    optimizer.load_state_dict()  yes             yes
    model.state_dict(), whole_weights            of weights
    model.load_state_dict()      yes             yes                                        yes
    a checkpoint is saved        with states     of weights; with states also of these      yes
    a checkpoint is loaded       yes             of weights alone: yes; all: it mends these
    tz.gathered(write=...)       with write      of weights                                 "first rank": yes
    p.norm() of split weights                    of weights
    a forward of a unit                          of its weights: `OffDeviceUpdates.before_forward`
    tz.EMA(model)                has none yet    of weights
    ema.update(), ema.swapped()  yes             of weights

"Of weights" and "of states" refuse half a step in these until it is restored; "yes" refuses one that is still to come,
which the others do, too. What is written into whole weights that are averages: `EMA.swapped` says it afterwards. What
gradients and gathered blocks require: `ModelGradients.require_whole`, `GatheredBlocks.require_unwritten`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from terrazzo.engine.model.weight_average import Average
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segments.off_device_updates import Half
from terrazzo.engine.replicas.rounds import Rounds
from terrazzo.errors import Misuse

__all__ = ["Requirements"]


@dataclass(frozen=True)
class Requirements:
    """The requirements of one model. Each method raises `Misuse` where its own is not met.

    Attributes:
        drivers: of the model's optimizers, as there are at the time.
        rounds: of replicas that train by themselves, if they do.
        average: of the weights, if there is one.
    """

    drivers: Iterable[OptimizerDriver]
    rounds: Rounds | None
    average: Average | None

    def own_weights(self, what: str) -> None:
        """Refuse `what` where the averages are in the place of the weights."""
        if self.average is not None and self.average.swapped:
            raise Misuse(
                f"{what} inside 'with ema.swapped():', where the model's weights are the average: call it outside."
            )

    def step_taken(self, what: str, reads: Half | None = None) -> None:
        """Refuse `what` where units have been updated whose `optimizer.step()` is still to come.

        Args:
            reads: what it reads; refused where that step was given up, too, until it has been restored.
        """
        for driver in self.drivers:
            driver.off_device.require_step_taken(what, reads)

    def at_rest(self, what: str, reads: Half | None = None) -> None:
        """Refuse `what` where weights and states are averages, or those of half a step. `reads` as of `step_taken`."""
        self.own_weights(what)
        self.step_taken(what, reads)

    def round_ended(self, what: str) -> None:
        """Refuse `what` within a round of replicas, each of which has weights of its own."""
        if self.rounds is not None:
            self.rounds.require_ended(what)
