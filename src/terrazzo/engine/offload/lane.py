"""Copies made by threads of their own, in step with the computation: a CUDA stream each, and nothing on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["Lane"]


class Lane:
    """A stream of its own, made once: fresh streams cost memory at every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """The point that the computation of this thread's device has reached."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """What is copied inside begins once `mark` is reached, and has ended when this returns."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
