"""Formats that the weights of a bucket are sent in: sizes, and what they mean for memory and for values.

`BucketSpec.weight_wire` is one of three: a dtype, blocks of 8 bits, or the packed codes that they rest in. Each has
its counterpart that moves tensors in `buckets/weights/weight_gathers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.formats.format_names import FrozenFormat, WireFormat

__all__ = ["BlockWire", "DtypeWire", "PackedWire", "WeightWire"]


class WeightWire(ABC):
    """Format that weights are sent in.

    Attributes:
        codes_stay: whether `between` keeps codes, which lie beside full weights from the gather of forward until full
            weights are released. Else it keeps a part of full weights, in their place until they are gathered again.
    """

    codes_stay = False

    @property
    @abstractmethod
    def rounds(self) -> bool:
        """Whether ranks see other values than those that are sent."""

    @abstractmethod
    def as_seen(self, values: Tensor, compute: torch.dtype) -> Tensor:
        """Return what ranks see of weights at rest that are sent: these themselves unless the format `rounds`.

        Args:
            values: 1-D, from the beginning of a block.
            compute: the dtype of full weights.
        """

    @abstractmethod
    def sent_bytes(self, numel: int) -> float:
        """Bytes of `numel` elements as they are sent; a fraction only in plans of spaces that are not padded."""

    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements in memory of its own, which goes once it is decoded; 0 for none."""
        return 0

    def scratch_bytes(self, numel: int, device: str) -> int:
        """Bytes to encode or decode `numel` elements on a kind of device."""
        return 0


@dataclass(frozen=True)
class DtypeWire(WeightWire):
    """Full weights in the dtype that is computed in, sent straight into their memory."""

    dtype: torch.dtype
    rounds = False

    def as_seen(self, values: Tensor, compute: torch.dtype) -> Tensor:
        return values

    def sent_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class BlockWire(WeightWire):
    """Blocks, encoded for the message alone."""

    form: WireFormat
    rounds = True

    def as_seen(self, values: Tensor, compute: torch.dtype) -> Tensor:
        return self.form.blocks.as_decoded(values, compute)

    def sent_bytes(self, numel: int) -> int:
        return self.form.blocks.size_bytes(numel)

    def message_bytes(self, numel: int) -> int:
        return self.form.blocks.size_bytes(numel)

    def scratch_bytes(self, numel: int, device: str) -> int:
        return self.form.blocks.scratch_bytes(numel, device)


@dataclass(frozen=True)
class PackedWire(WeightWire):
    """The codes that weights rest in, sent into the memory that they are decoded in."""

    form: FrozenFormat
    rounds = False
    codes_stay = True

    def as_seen(self, values: Tensor, compute: torch.dtype) -> Tensor:
        return values

    def sent_bytes(self, numel: int) -> float:
        return numel * self.form.itemsize

    def scratch_bytes(self, numel: int, device: str) -> int:
        return self.form.blocks.scratch_bytes(numel, device)
