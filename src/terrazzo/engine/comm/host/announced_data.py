"""What goes ahead of data between machines: a message that says what they are, and how many bytes.

gloo ends a process when a message is longer than the place for it. So the tag of the data depends on their label and
their size: data of another are never received, and the announcement, which is of one size always, says what they are.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from terrazzo.engine.comm.tags import EXCHANGES
from terrazzo.engine.labels.label import Label
from terrazzo.engine.runtime.device import HOST

__all__ = ["Announcement", "Stamp", "announced_as"]

_KINDS = 2
_HASHES = len(EXCHANGES) // (2 * _KINDS)  # the announcement and the data of each kind


class Stamp(NamedTuple):
    """Marks of the messages of one exchange.

    Attributes:
        label: what is moved.
        kind: the number of the kind of exchange, whose messages have tags of their own.
        number: a hash of which of these it is.
    """

    label: Label
    kind: int
    number: int

    @classmethod
    def of(cls, label: Label, shared: bool, kind: int, count: int) -> Self:
        """The stamp of an exchange: the messages of one model do not meet those of another.

        Args:
            shared: whether it goes by links that models share, which count them apart.
            count: how many exchanges of this kind have begun by those links, with this one.
        """
        return cls(label, kind, zlib.crc32(struct.pack("<?QQ", shared, label.model, count)))

    @property
    def first(self) -> int:
        """The tag of announcements."""
        return self.number % _HASHES * 2 * _KINDS + self.kind

    def then(self, size_bytes: int) -> int:
        """The tag of data of so many bytes."""
        mixed = zlib.crc32(struct.pack("<QQ", self.label.code, size_bytes), self.number)
        return mixed % _HASHES * 2 * _KINDS + _KINDS + self.kind


def announced_as(label: Label, data: Tensor) -> Tensor:
    """The announcement of `data`, as it is sent."""
    return torch.tensor([label.code, data.nbytes], device=HOST)


class Announcement:
    """The place for another rank's announcement.

    Args:
        label, size_bytes: what this rank expects.
        source: the rank, among all.

    Attributes:
        message: to be received.
    """

    def __init__(self, label: Label, size_bytes: int, source: int) -> None:
        self._label, self._size_bytes, self._source = label, size_bytes, source
        self.message = torch.zeros(2, dtype=torch.int64, device=HOST)

    def check(self) -> None:
        """Refuse what has been announced, where it is not what this rank expects.

        Raises:
            PlacesDiffer: there.
        """
        code, size_bytes = self.message.tolist()
        self._label.check(self._size_bytes, self._source, code, size_bytes)
