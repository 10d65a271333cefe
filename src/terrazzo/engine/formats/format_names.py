"""Every format by its name in a `Precision`: one row for each, which equals that name."""

from __future__ import annotations

import enum
from typing import Any, Self

from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.formats.nf4 import NF4_BLOCKS, NF4_DOUBLE_BLOCKS
from terrazzo.engine.formats.sent_blocks import SENT_FP8, SENT_INT4, SENT_INT8
from terrazzo.engine.formats.state_blocks import STATE_FP8, STATE_INT8, StateBlocks

__all__ = ["FrozenFormat", "StateFormat", "WireFormat"]


class _FormatName(enum.StrEnum):
    """The attribute `blocks`, and what follows it in a row, are set by `_fill`."""

    blocks: Any

    def __new__(cls, name: str, *row: Any) -> Self:
        made = str.__new__(cls, name)
        made._value_ = name
        made._fill(*row)
        return made

    def _fill(self, *row: Any) -> None:
        (self.blocks,) = row


class StateFormat(_FormatName):
    """How an optimizer's states may be kept in less than any dtype that it computes in: see `formats/state_blocks`.

    Attributes:
        blocks: its sizes and codes.
    """

    blocks: StateBlocks

    INT8 = "int8", STATE_INT8
    FP8 = "fp8", STATE_FP8

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return self.blocks.bytes_per_element


class FrozenFormat(_FormatName):
    """How frozen matrices may be kept in less than any dtype that is computed in: see `formats/nf4`.

    Attributes:
        blocks: its sizes and codes.
    """

    blocks: BlockCodes

    NF4 = "nf4", NF4_BLOCKS
    NF4_DOUBLE = "nf4-double", NF4_DOUBLE_BLOCKS

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return self.blocks.bytes_per_element


class WireFormat(_FormatName):
    """What matrices may be sent as in less than any dtype: see `formats/sent_blocks`.

    Attributes:
        blocks: its sizes and codes.
        of_weights, of_gradients: whether these may be sent so.
    """

    blocks: BlockCodes
    of_weights: bool
    of_gradients: bool

    INT8 = "int8", SENT_INT8, "weights", "gradients"
    FP8 = "fp8", SENT_FP8, "weights"
    INT4 = "int4", SENT_INT4, "gradients"

    def _fill(self, *row: Any) -> None:
        self.blocks, *sent = row
        self.of_weights, self.of_gradients = "weights" in sent, "gradients" in sent
