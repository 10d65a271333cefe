"""Places of parameters in a flat index space. Integers only: no tensors, no communication.

A `Layout` lays parameters end to end, each starting on a multiple of `ALIGN` elements, and pads the end so that the
space divides evenly over every rank into multiples of `ALIGN`. A rank's share of the space over an ordered list of
mesh axes is one contiguous range: the first axis cuts the space, the next axis cuts that piece, and so on. Shares over
a longer list therefore nest inside shares over its prefix, which is why every move between two places is one
contiguous collective per axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from terrazzo.engine.formats.block_format import BlockFormat

__all__ = [
    "ALIGN",
    "PAGE_BYTES",
    "Layout",
    "Range",
    "Slot",
    "padded_bytes",
    "round_up",
    "share",
    "travels_in_blocks",
]

ALIGN = 64
"""Elements. Keeps views on cache lines, and fused CPU AdamW bitwise independent of where a shard is cut."""

_LEAST_NUMEL = 256
"""Elements: matrices of fewer are sent as they are."""

PAGE_BYTES = 4096
"""Host memory for states, and files, come in whole pages of this size."""


@dataclass(frozen=True)
class Range:
    """The half-open interval [start, stop) of a flat index space, in elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Range) -> Range:
        """The common part; an empty range, never a negative one, when there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def from_start_of(self, outer: Range) -> Range:
        """This range, counted from where `outer` begins."""
        return Range(self.start - outer.start, self.stop - outer.start)

    def within(self, outer: Range) -> slice:
        """This range as a slice of a tensor that holds `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)

    def pieces(self, numel: int) -> Iterator[Range]:
        """Yield it in parts of `numel` elements, the last one shorter."""
        for start in range(self.start, self.stop, numel):
            yield Range(start, min(start + numel, self.stop))

    def around(self, blocks: BlockFormat) -> Range:
        """The whole blocks that these elements touch."""
        return Range(self.start // blocks.numel * blocks.numel, round_up(self.stop, blocks.numel))

    def as_bytes(self, blocks: BlockFormat) -> Range:
        """Range of the bytes of whole blocks that hold these elements, among the bytes of all blocks."""
        return Range(blocks.size_bytes(self.start), blocks.size_bytes(self.stop))

    def as_elements(self, blocks: BlockFormat) -> Range:
        """Elements whose whole blocks have this range of bytes; the reverse of `as_bytes`."""
        return Range(self.start // blocks.nbytes * blocks.numel, self.stop // blocks.nbytes * blocks.numel)


@dataclass(frozen=True)
class Slot:
    """One parameter's place: `numel` elements of `shape` (row-major) from `offset` on; `names[0]` is its own name."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    align: int = ALIGN

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides of a row-major tensor, in elements."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def range(self) -> Range:
        return Range(self.offset, self.offset + self.numel)

    def own(self, part: Range) -> Range:
        """Elements of the parameter that `part`, a range inside of the slot, holds."""
        return part.from_start_of(self.range)

    @cached_property
    def padded(self) -> Range:
        """The slot with the padding after it, up to the next slot."""
        return Range(self.offset, self.offset + round_up(self.numel, self.align))


@dataclass(frozen=True, eq=False)
class Layout:
    """A flat index space: parameters in an order, or the bytes of blocks.

    Attributes:
        slots: the parameters; none in a space of bytes.
        numel: how many elements it has, with the padding.
        blocks: the format of which the elements of this space are bytes; None where they are elements of parameters.
    """

    slots: tuple[Slot, ...]
    numel: int
    blocks: BlockFormat | None = None

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[tuple[str, ...], tuple[int, ...]]], shards: int, align: int = ALIGN
    ) -> Layout:
        """Lay out `parameters` in the order given.

        Args:
            parameters: (names, shape) of each; several names mean tied parameters.
            shards: how many equal shards the space must divide into.
            align: parameters and shards begin on multiples of so many elements.
        """
        slots, offset = [], 0
        for names, shape in parameters:
            slots.append(Slot(names, tuple(shape), offset, align))
            offset += round_up(math.prod(shape), align)
        return cls(tuple(slots), round_up(offset, align * shards))

    @property
    def whole(self) -> Range:
        return Range(0, self.numel)

    def as_bytes(self, blocks: BlockFormat) -> Layout:
        """Space of the bytes of its blocks."""
        return Layout((), blocks.size_bytes(self.numel), blocks)

    @cached_property
    def gaps(self) -> list[Range]:
        """The padding: what lies after each parameter and at the end. It holds zeros, unless an optimizer without
        `eps` makes NaN of them, which is refused where padding is read: in blocks of codes.
        """
        gaps = [Range(slot.range.stop, slot.padded.stop) for slot in self.slots]
        end = self.slots[-1].padded.stop if self.slots else 0
        return [gap for gap in [*gaps, Range(end, self.numel)] if gap.numel]


def share(whole: Range, cuts: Sequence[tuple[int, int]]) -> Range:
    """The part of `whole` left after each cut (index, parts) in turn; every cut must divide evenly."""
    start, numel = whole.start, whole.numel
    for index, parts in cuts:
        assert numel % parts == 0, f"{numel} elements do not divide into {parts}"
        numel //= parts
        start += index * numel
    return Range(start, start + numel)


def travels_in_blocks(shape: Sequence[int]) -> bool:
    """Whether a parameter of that shape may be sent in blocks: matrices, and no norms, biases or few numbers.

    Args:
        shape: of the whole parameter, so that the answer is the same wherever it is cut.
    """
    return len(shape) >= 2 and math.prod(shape) >= _LEAST_NUMEL


def round_up(value: int, multiple: int) -> int:
    """The next multiple, or `value` itself if it is one."""
    return -(-value // multiple) * multiple


def padded_bytes(count_bytes: int) -> int:
    """`count_bytes` rounded up to whole pages."""
    return round_up(count_bytes, PAGE_BYTES)
