"""What was computed from tensors, remembered for as long as that is what it was."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["TensorMemo"]

T = TypeVar("T")


class TensorMemo(Generic[T]):
    """A value that was computed from each of some tensors. It is forgotten once that is gone, or changed in place.

    Torch does not count changes of a tensor that was made in inference mode. The value of one is remembered `within`
    something alone, during which nobody changes it. Nor does it count what is written past it, by NumPy or `.data`: a
    tensor in host memory is compared with a copy, too. One of a device would have to be waited for.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], object, Tensor | None, T]] = {}

    def keep(self, tensor: Tensor, value: T, within: object = None) -> None:
        """Remember `value` of this very tensor, where something tells when it changes."""
        if (version := _version_of(tensor, within)) is None:
            return
        number = id(tensor)
        known = weakref.ref(tensor, lambda _: self._kept.pop(number, None))
        was = tensor.detach().clone() if tensor.device.type == "cpu" else None
        self._kept[number] = known, version, was, value

    def of(self, tensor: Tensor, within: object = None) -> T | None:
        """The value of this very tensor; None where it is not known."""
        if (version := _version_of(tensor, within)) is None or id(tensor) not in self._kept:
            return None
        known, its_version, was, value = self._kept[id(tensor)]
        is_same = known() is tensor and version == its_version and (was is None or torch.equal(tensor, was))
        return value if is_same else None


def _version_of(tensor: Tensor, within: object) -> object:
    """What changes with the tensor; None where nobody knows."""
    return within if tensor.is_inference() else tensor._version
