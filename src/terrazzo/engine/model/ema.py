"""The moving average of a sharded model's weights, as a training loop has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.model.weight_average import Average
from terrazzo.errors import Misuse

__all__ = ["EMA"]


class EMA:
    """The exponential moving average of a sharded model's trained weights. Making one is collective.

    Call `update` after each step, and evaluate inside `swapped`. An update sets average = decay * average +
    (1 - decay) * weight, of master weights and in their dtype, each rank its own part. The average begins as the
    weights are when it is made: the values are those of `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn(decay)` whose first `update_parameters` was called then.

    Checkpoints with the optimizer's state have the average, too. Its memory is that of the
    master weights on a rank: on the device, `average_bytes` of the memory bill from now on, or in host memory where the
    optimizer's state is off it.

    Args:
        model: sharded, with one average at most. Frozen weights and buffers are not averaged.
        decay: from 0 to 1, the same on every rank. It may be set to another value between updates.

    Raises:
        BadInput: a decay that is not from 0 to 1, or 16-bit master weights, whose average would stand still; on every
            rank, where ranks give different ones.
        Misuse: a model that is not sharded, or has an average, or whose replicas train by themselves; this and what
            follows while units are ahead of an `optimizer.step()` that is still to come.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self._engine = engine = engine_of(model)

        def made() -> Average:
            engine.requires.step_taken("tz.EMA(model)", reads="weights")
            if engine.average is not None:
                raise Misuse("This model has an average already: keep the tz.EMA that was made first.")
            if engine.rounds is not None:
                raise Misuse(
                    "tz.EMA of a model whose replicas train by themselves (diloco): each would have another average. "
                    "Leave the average out; the weights after an outer step are a mean already."
                )
            return Average(decay, engine.precision.exact_master)

        self._average = all_or_none(engine.axes, made)
        self._average.compare(engine.axes)
        engine.have_masters()
        self._average.begin(engine.trainable())
        engine.keep_average(self._average)

    @property
    def decay(self) -> float:
        """How much of the average stays at an update."""
        return self._average.decay

    @decay.setter
    def decay(self, decay: float) -> None:
        self._average.decay = decay

    def update(self) -> None:
        """Take in the weights of now. To be called after `optimizer.step()`, on every rank.

        Raises:
            Misuse: inside `swapped`.
        """
        self._engine.requires.at_rest("ema.update()", reads="weights")
        self._engine.have_masters()
        self._average.update()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The model has the averages as its weights inside, and its own after, to the bit. Collective.

        Raises:
            BadInput: on every rank, where the decays of ranks, or how often they have updated, have differed. Saving
                with the optimizer raises it, too.
            Misuse: inside itself. Inside, `optimizer.step()`, loading, and saving more than weights raise it, too.
        """
        self._engine.requires.at_rest("ema.swapped()", reads="weights")
        self._average.compare(self._engine.axes)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self._engine.settle()
        self._average.swap()
        self._engine.publish()
