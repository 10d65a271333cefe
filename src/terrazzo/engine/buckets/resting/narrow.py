"""What an optimizer keeps for each element at rest in 8 bits, on any tier: it is opened, saved and restored in fp32.

Blocks count from where a parameter begins, and a rank's range is whole blocks, so that in memory and in files the codes
are a state of their own, of 260 bytes for every 256 elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Access, Buffer, Resting, Space
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.format_names import StateFormat
from terrazzo.engine.plan.layout import Range, tiles

__all__ = ["NarrowState"]

_NARROW_STATES = {"exp_avg": False, "exp_avg_sq": True, "max_exp_avg_sq": True, "momentum_buffer": False}
"""What optimizers keep for each element that may be in 8 bits, and whether it is an average of squares."""


@dataclass(eq=False)
class NarrowState(Resting):
    """The elements of `space.range(axes)` of one state.

    Attributes:
        codes: where the bytes are.
        kind: the optimizer's own name of it, which says whether it is an average of squares.
    """

    space: Space
    axes: tuple[str, ...]
    codes: Resting
    form: StateFormat
    kind: str

    def __post_init__(self) -> None:
        self._squares = _NARROW_STATES[self.kind]

    @property
    def dtype(self) -> torch.dtype:
        """That in which it is opened."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def cuts(self, wanted: Range) -> Iterator[Range]:
        own, blocks = self.range.intersect(wanted), self.form.blocks
        for part in self.codes.cuts(own.around(blocks).as_bytes(blocks)):
            elements = part.as_elements(blocks)
            each = tiles(elements, self.codes.data.device.type) if isinstance(self.codes, Buffer) else [elements]
            yield from (cut for tile in each if (cut := tile.intersect(own)).numel)

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        own = self.range.intersect(wanted)
        spanned = own.around(self.form.blocks)
        with self.codes.opened(spanned.as_bytes(self.form.blocks), "read" if access == "read" else "change") as codes:
            values = self.decoded(codes)
            yield values[own.within(spanned)]
            if access != "read":
                self.encode(values, codes)

    def load(self, into: Tensor) -> Moves[None]:
        yield from ()
        for part in self.cuts(self.range):
            with self.opened(part) as data:
                into[part.within(self.range)].copy_(data)

    def decoded(self, codes: Tensor) -> Tensor:
        """The values of whole blocks, 1-D fp32, in memory of their own."""
        return self.form.blocks.decode(codes, self._squares)

    def encode(self, values: Tensor, into: Tensor) -> None:
        """Replace whole blocks of codes."""
        self.form.blocks.encode(values, self._squares, into)
