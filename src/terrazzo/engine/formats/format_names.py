"""Every format by its name in a `Precision`: one row for each, which equals that name."""

from __future__ import annotations

import enum
from typing import Any, Self

from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.formats.nf4 import NF4_BLOCKS, NF4_DOUBLE_BLOCKS
from terrazzo.engine.formats.sent_blocks import SENT_FP8, SENT_INT4, SENT_INT8
from terrazzo.engine.formats.state_blocks import STATE_FP8, STATE_INT8, StateBlocks

__all__ = ["GRADIENT_FORMATS", "WEIGHT_FORMATS", "FrozenFormat", "StateFormat", "WireFormat"]


class _FormatName(enum.StrEnum):
    """A row: the name, and the object that has its sizes and codes."""

    blocks: Any

    def __new__(cls, name: str, *row: Any) -> Self:
        made = str.__new__(cls, name)
        made._value_ = name
        (made.blocks,) = row
        return made

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return float(self.blocks.bytes_per_element)


class StateFormat(_FormatName):
    """How an optimizer's states may be kept in less than any dtype that it computes in: see `formats/state_blocks`.

    Attributes:
        blocks: its sizes and codes.
    """

    blocks: StateBlocks

    INT8 = "int8", STATE_INT8
    FP8 = "fp8", STATE_FP8


class FrozenFormat(_FormatName):
    """How frozen matrices may be kept in less than any dtype that is computed in: see `formats/nf4`.

    Attributes:
        blocks: its sizes and codes.
    """

    blocks: BlockCodes

    NF4 = "nf4", NF4_BLOCKS
    NF4_DOUBLE = "nf4-double", NF4_DOUBLE_BLOCKS


class WireFormat(_FormatName):
    """What matrices may be sent as in less than any dtype: see `formats/sent_blocks`.

    Attributes:
        blocks: its sizes and codes.
    """

    blocks: BlockCodes

    INT8 = "int8", SENT_INT8
    FP8 = "fp8", SENT_FP8
    INT4 = "int4", SENT_INT4


WEIGHT_FORMATS = (WireFormat.INT8, WireFormat.FP8)
"""Formats that weights may be gathered in."""
GRADIENT_FORMATS = (WireFormat.INT8, WireFormat.INT4)
"""Formats that gradients may be sent in."""
