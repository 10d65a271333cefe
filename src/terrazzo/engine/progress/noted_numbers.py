"""Numbers that ranks compare, as they were when they were noted: those on a device come to the host meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terrazzo.engine.runtime.device import HOST, Stream, is_cuda

__all__ = ["NotedNumbers"]


class NotedNumbers:
    """Numbers by name, as they were when this was made: an optimizer's hyper-parameters, factors of gradients.

    One in a device's memory, such as an `lr` that is a tensor there, goes to the host after what is queued: a copy of
    eight bytes. `values` waits for it, where ranks next meet. The device, which has the forward to do by
    then, is kept busy; but the host is no longer further ahead of it than the pass that comes after its last step.

    Args:
        numbers: tensors have one element; what is in the host's memory is read at once.
    """

    def __init__(self, numbers: Mapping[str, float | Tensor]) -> None:
        self._marks: list[torch.Event] = []
        self._numbers = {key: self._noted(number) for key, number in numbers.items()}

    def _noted(self, number: float | Tensor) -> float | Tensor:
        if not isinstance(number, Tensor) or not is_cuda(number.device):
            return float(number)
        copy = number.detach().double().to(HOST, non_blocking=True)  # pinned
        if (mark := Stream.current(number.device).mark()) is not None:
            self._marks.append(mark)
        return copy

    def values(self) -> dict[str, float]:
        """The numbers; waits for those that are on their way."""
        for mark in self._marks:
            mark.synchronize()
        self._marks = []
        return {key: float(number) for key, number in self._numbers.items()}

    def followed_by(self, numbers: Mapping[str, float | Tensor]) -> NotedNumbers:
        """Note numbers of a later step under the same keys: ranks compare as many as ever, whoever adds a key."""
        return NotedNumbers({key: numbers.get(key, 0.0) for key in self._numbers})
