"""An exponential moving average of the weights, split as the optimizer's state is."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch
from torch import nn

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.buffer import Buffer
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.model.together import check_agreement, together
from terrazzo.errors import BadInput, Misuse

__all__ = ["EMA"]


class EMA:
    """The average of a sharded model's trained weights: `update` after each step, `swapped` to evaluate with it.

    average = decay * average + (1 - decay) * weight, of master weights, in their dtype. It begins as they are now.
    The values are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, whose first update
    takes the weights as they are. Checkpoints that have the optimizer's state have the average, too.

    Memory: as much as the master weights take on a rank; in host memory where the optimizer's state is not on the
    device. The memory bill does not have it.

    Making one is collective.

    Args:
        model: sharded, with one average at most. Frozen weights and buffers are not averaged.
        decay: from 0 to 1, the same on every rank. It may be set to another value between updates.

    Raises:
        BadInput: a decay that is none, or 16-bit master weights, whose average would stand still; on every rank where
            ranks give others.
        Misuse: a model that is not sharded, or has an average.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self._decay, self._model, self._engine = decay, model, engine_of(model)
        self._updates, self._digest = 0, 0  # how many there were, and of their decays
        together(self._engine.axes, self._check)
        self._compare_decays()
        self._engine.update_masters()
        self._averages = {bucket: _copy_of_master(bucket) for bucket in self._engine.trainable()}
        self._engine.averages = self._averages

    @property
    def decay(self) -> float:
        """How much of the average stays at an update."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        _check_decay(decay)
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of now. To be called after `optimizer.step()`, on every rank.

        Raises:
            Misuse: inside `swapped`.
        """
        self._engine.require_own_weights("ema.update()")
        self._engine.update_masters()
        self._updates, self._digest = self._updates + 1, zlib.crc32(repr(self.decay).encode(), self._digest)
        for bucket, average in self._averages.items():
            for cut in bucket.master.cuts(average.range):
                with bucket.master.opened(cut) as weights:
                    part = average.part(cut)
                    part.lerp_(weights.to(part.device), 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The model has the averages as its weights inside, and its own after, to the bit. Collective.

        Raises:
            BadInput: on every rank, where the decays of ranks, or how often they have updated, have differed.
            Misuse: inside itself. Inside, `optimizer.step()`, loading, and saving more than weights raise it, too.
        """
        self._engine.require_own_weights("ema.swapped()")
        self._compare_decays()
        self._exchange()
        self._engine.swapped = True
        try:
            yield
        finally:
            self._engine.swapped = False
            self._exchange()

    def _check(self) -> None:
        _check_decay(self.decay)
        if self._engine.averages:
            kind = type(self._model).__name__
            raise Misuse(f"This {kind} has an average already: keep the tz.EMA that was made first.")
        if (dtype := self._engine.precision.master).itemsize < torch.float32.itemsize:
            raise BadInput(
                f"tz.EMA of master weights in {dtype}, where 1 - decay of a weight is rounded away: shard the model "
                "with precision='bf16', which has fp32 masters."
            )

    def _compare_decays(self) -> None:
        fix = "Give tz.EMA the same decay on every rank, and call ema.update() on all of them."
        updates = f"{self._updates}, the digest of their decays {self._digest:08x}"
        check_agreement(self._engine.axes, {"decay": self.decay, "updates": updates}, fix)

    @torch.no_grad()
    def _exchange(self) -> None:
        self._engine.settle()
        for bucket, average in self._averages.items():
            for cut in bucket.master.cuts(average.range):
                with bucket.master.opened(cut, "change") as weights:
                    part = average.part(cut)
                    kept = weights.to(part.device, copy=True)
                    weights.copy_(part)
                    part.copy_(kept)
        self._engine.publish()


def _check_decay(decay: float) -> None:
    if not 0 <= decay <= 1:
        raise BadInput(f"tz.EMA with decay {decay!r}: give a number from 0 to 1, such as 0.999.")


def _copy_of_master(bucket: Bucket) -> Buffer:
    master = bucket.master
    device = bucket.recipe.axes.device if bucket.tiers.optim == "device" else torch.device("cpu")
    return Buffer(bucket.space, bucket.optim_axes, master.copied(master.range, device))
