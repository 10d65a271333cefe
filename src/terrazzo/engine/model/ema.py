"""The moving average of a sharded model's weights, as a training loop has it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from torch import nn

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.model.weight_average import Average
from terrazzo.errors import Misuse
from terrazzo.messages import listed

__all__ = ["EMA"]

_MAKING, _SWAPPING = collective_call("tz.EMA(model)"), collective_call("ema.swapped()")
_SWAPPING_BACK = collective_call("the end of 'with ema.swapped()'")


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

        with labelled(_MAKING):
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

        What is written into whole weights inside is the average's, as it is of torch's `AveragedModel`, and refused at
        the end, on every rank, where it is seen: not of fp32 weights through `.data`, which leaves no trace.

        Raises:
            BadInput: on every rank, where the decays of ranks, or how often they have updated, have differed. Saving
                with the optimizer raises it, too.
            Misuse: inside itself, and at the end, for what was written. Inside, `optimizer.step()`, loading,
                `tz.gathered` with `write`, and saving more than weights raise it, too.
        """
        self._engine.requires.at_rest("ema.swapped()", reads="weights")
        with labelled(_SWAPPING):
            self._average.compare(self._engine.axes)
        self._swap()
        written: list[str] = []
        try:
            yield
        finally:
            written = self._swap()
        with labelled(_SWAPPING_BACK):
            all_or_none(self._engine.axes, functools.partial(_refuse_written, written))

    def _swap(self) -> list[str]:
        """Exchange average and weights; returns what has been written into whole ones since this was last called."""
        self._engine.settle()
        edits = [bucket.full.edits for bucket in self._average.buffers]
        written = sorted(name for each in edits for name in each.taken_over)
        for each in edits:
            each.taken_over.clear()
        self._average.swap()
        self._engine.publish()
        return written


def _refuse_written(written: Sequence[str]) -> None:
    if written:
        names = listed([*map(repr, written)])
        raise Misuse(
            f"Weights were written to inside 'with ema.swapped():', at least one of {names}: the "
            "average has that for good, and the model's own weights, which are back, have not. Write outside of it, "
            "and load a checkpoint if the average is to be what it was. A forward that writes, as of embeddings with "
            "max_norm, runs on a plain model with the model.state_dict() of inside."
        )
