"""New weights on their way to the device: cast in the host's memory, so that PCIe carries them in their own dtype."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from terrazzo.engine.runtime.device import Stream

__all__ = ["Sending"]


class Sending:
    """Copies from host memory to wherever weights rest, by one thread: that of a model's updates off the device.

    Args:
        stream: in which the callers' work on the device is queued.
        cells: uint8 host memory, of one size; none where nothing is cast on its way to a device.
    """

    def __init__(self, stream: Stream, cells: Iterable[Tensor]) -> None:
        self._stream = stream
        self._cells: deque[tuple[Tensor, torch.Event | None]] = deque((cell, None) for cell in cells)

    def copy(self, values: Tensor, into: Tensor) -> None:
        """Copy `values`, 1-D in host memory, into as many elements of any dtype; what goes to a device is queued."""
        if into.device == values.device or into.dtype == values.dtype:
            into.copy_(values, non_blocking=True)
            return
        room = self._cells[0][0].numel() // into.element_size()
        for part, target in zip(values.split(room), into.split(room), strict=True):
            self._copy(part, target)

    def _copy(self, values: Tensor, into: Tensor) -> None:
        cell, sent = self._cells[0]
        if sent is not None:
            sent.synchronize()
        cast = cell.view(into.dtype)[: values.numel()].copy_(values)
        into.copy_(cast, non_blocking=True)
        self._cells[0] = cell, self._stream.mark()
        self._cells.rotate(-1)
