"""What was computed from a tensor, remembered for as long as that is what it was."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["TensorMemo"]

T = TypeVar("T")


class TensorMemo(Generic[T]):
    """A value that was computed from one tensor. It is forgotten once that is gone, or has been changed in place.

    Of a tensor that was made in inference mode nothing is remembered: torch does not count its changes.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[Tensor], int, T] | None = None

    def keep(self, tensor: Tensor, value: T) -> None:
        """Remember `value`, and forget that of any other tensor."""
        self._kept = None if tensor.is_inference() else (weakref.ref(tensor), tensor._version, value)

    def of(self, tensor: Tensor) -> T | None:
        """The value of this very tensor; None where it is not known."""
        if self._kept is None or tensor.is_inference():
            return None
        known, version, value = self._kept
        return value if known() is tensor and version == tensor._version else None
