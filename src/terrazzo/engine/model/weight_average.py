"""An exponential moving average of master weights, as a rank keeps its part."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Access, Buffer
from terrazzo.engine.consensus.joint_checks import check_alike
from terrazzo.engine.mesh.axes import Axes
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_number

__all__ = ["Average"]


class Average:
    """This rank's part of an average, split as the optimizer's state is. It has values once it has begun.

    Args:
        decay: how much of the average stays at an update.
        dtype: of master weights.

    Attributes:
        buffers: the averages of each bucket's master weights.
        swapped: whether they are where the master weights are to be.

    Raises:
        BadInput: a decay that is none, or a dtype in which the average would stand still.
    """

    def __init__(self, decay: float, dtype: torch.dtype) -> None:
        self._decay = decay
        self._updates, self._decays = 0, 0  # how many updates there were, and a checksum of the decays of each
        self.buffers: dict[Bucket, Buffer] = {}
        self.swapped = False
        _check_decay(decay)
        if dtype.itemsize < torch.float32.itemsize:
            raise BadInput(
                f"tz.EMA of master weights in {dtype}, where 1 - decay of a weight is rounded away: shard the model "
                "with precision='bf16', which has fp32 masters."
            )

    @property
    def decay(self) -> float:
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        _check_decay(decay)
        self._decay = decay

    def compare(self, axes: Axes) -> None:
        """Compare the averages of the ranks, which may differ. Collective.

        Raises:
            BadInput: on every rank, where they have.
        """
        fix = "Give tz.EMA the same decay on every rank, and call ema.update() on all of them."
        updates = f"{self._updates}, the checksum of their decays {self._decays:08x}"
        check_alike(axes, {"decay": self.decay, "updates": updates}, axes.whole_mesh, fix)

    def begin(self, buckets: Iterable[Bucket]) -> None:
        """Begin as the master weights are now."""
        self.buffers = {bucket: _copy_of_master(bucket) for bucket in buckets}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the master weights of now."""
        self._updates, self._decays = self._updates + 1, zlib.crc32(repr(self.decay).encode(), self._decays)
        for average, weights in self._parts("read"):
            average.lerp_(weights.to(average.device), 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange it with the master weights; weights at rest do not follow by themselves."""
        for average, weights in self._parts("change"):
            swapped = weights.to(average.device, copy=True)
            weights.copy_(average)
            average.copy_(swapped)
        self.swapped = not self.swapped

    def _parts(self, access: Access) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the average, and of the master weights, which may be on `nvme`."""
        for bucket, average in self.buffers.items():
            for cut in bucket.exact.cuts(average.range):
                with bucket.exact.opened(cut, access) as weights:
                    yield average.part(cut), weights


def _check_decay(decay: float) -> None:
    if not (is_number(decay) and 0 <= decay <= 1):
        raise BadInput(f"tz.EMA with decay {decay!r}: give a number from 0 to 1, such as 0.999.")


def _copy_of_master(bucket: Bucket) -> Buffer:
    master = bucket.exact
    device = bucket.axes.device if bucket.spec.average_tier == "device" else torch.device("cpu")
    return Buffer(bucket.space, bucket.spec.optim_axes, master.copied(master.range, device))
