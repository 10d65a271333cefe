"""What was computed from a tensor, remembered for as long as that is what it was."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["TensorMemo"]

T = TypeVar("T")


class TensorMemo(Generic[T]):
    """A value that was computed from one tensor. It is forgotten once that is gone, or has been changed in place.

    Torch does not count changes of a tensor that was made in inference mode. The value of one is remembered `within`
    something alone, during which nobody changes it.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[Tensor], object, T] | None = None

    def keep(self, tensor: Tensor, value: T, within: object = None) -> None:
        """Remember `value`, and forget that of any other tensor."""
        self._kept = weakref.ref(tensor), _version_of(tensor, within), value

    def of(self, tensor: Tensor, within: object = None) -> T | None:
        """The value of this very tensor; None where it is not known."""
        if self._kept is None or (version := _version_of(tensor, within)) is None:
            return None
        known, its_version, value = self._kept
        return value if known() is tensor and version == its_version else None

    def forget(self) -> None:
        """Forget the value."""
        self._kept = None


def _version_of(tensor: Tensor, within: object) -> object:
    """What changes with the tensor; None where nobody knows."""
    return within if tensor.is_inference() else tensor._version
