"""Copies made by threads of their own, in step with the computation: a CUDA stream each, and nothing on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from terrazzo.engine import device as devices

__all__ = ["Lane"]


class Lane:
    """A stream of its own, made once: fresh streams cost memory at every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = devices.side_stream(device)

    def mark(self) -> torch.Event | None:
        """The point that the computation of this thread's device has reached."""
        return devices.mark(self._device)

    @contextlib.contextmanager
    def after(self, mark: torch.Event | None) -> Iterator[None]:
        """What is copied inside begins once `mark` is reached, and has ended when this returns."""
        if self._stream is None:
            yield
            return
        devices.stand_on(self._device)
        with devices.on_stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
