"""Master weights in 32 bits whose upper half are weights in bf16, at rest on any tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Access, AsSeen, Buffer, Resting, Space
from terrazzo.engine.formats.bf16_remainder import join_remainder, split_remainder
from terrazzo.engine.formats.block_format import tile_numel
from terrazzo.engine.plan.layout import Range

__all__ = ["WithRemainder"]


@dataclass(eq=False)
class WithRemainder(Resting):
    """The elements of `space.range(axes)` in fp32: joined where they are opened, and split again if written.

    Attributes:
        nearest: the same in bf16.
        remainder: what that leaves out, int16.
    """

    space: Space
    axes: tuple[str, ...]
    nearest: Resting
    remainder: Resting

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def cuts(self, wanted: Range) -> Iterator[Range]:
        """Yield tiles of what is in memory; of what is in files whole cells, which are read as a whole."""
        for part in self.remainder.cuts(wanted):
            rests = self.remainder
            yield from part.pieces(tile_numel(rests.data.device.type)) if isinstance(rests, Buffer) else [part]

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        with self.nearest.opened(wanted, access) as nearest, self.remainder.opened(wanted, access) as remainder:
            values = join_remainder(nearest, remainder)
            yield values
            if access != "read":
                for half, new in zip((nearest, remainder), split_remainder(values), strict=True):
                    half.copy_(new)

    def forget(self, elements: Range) -> None:
        """Take `elements` as they are in bf16: somebody has written these."""
        for part in self.remainder.cuts(elements):
            with self.remainder.opened(part, "replace") as remainder:
                remainder.zero_()

    def forget_changed(self, written: Resting, as_seen: AsSeen) -> None:
        """Take the elements that are not seen as they are in `written` as they are in bf16."""
        for part in self.remainder.cuts(self.range):
            with (
                self.remainder.opened(part, "change") as remainder,
                self.nearest.opened(part) as nearest,
                written.opened(part) as new,
            ):
                remainder.mul_(as_seen(nearest).to(device=new.device, dtype=new.dtype).eq(new).to(remainder.device))
