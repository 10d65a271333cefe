"""Where chains of collectives run: beside the computation, or in step with it where the host does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine import device as devices
from terrazzo.engine.links.transfer import Side

__all__ = ["side_of"]


def side_of(device: torch.device, backends: Collection[str]) -> Side | None:
    """Of a mesh on `device`; None where the host itself does the work, or waits for it.

    Args:
        backends: of the mesh's axes.
    """
    if devices.is_cuda(device):
        return _Stream(device)
    return Side() if "fake" in backends else None


class _Stream(Side):
    """A stream of one device, made once. Memory that chains allocate for themselves is its own."""

    def __init__(self, device: torch.device) -> None:
        stream = devices.side_stream(device)
        assert stream is not None, "CUDA has streams"
        self._device, self._stream, self._user = device, stream, stream

    @contextlib.contextmanager
    def chain(self) -> Iterator[None]:
        self._user = devices.stream_of_thread(self._device)
        self._stream.wait_stream(self._user)
        with devices.on_stream(self._stream):
            yield

    def home(self) -> AbstractContextManager[Any]:
        return devices.on_stream(self._user)

    def lend(self, make: Callable[[], Tensor]) -> Tensor:
        with self.chain():
            made = make()
            mark = self.mark()
        self.wait(mark)
        return made

    def mark(self) -> torch.Event | None:
        mark: torch.Event = self._stream.record_event()
        return mark

    def wait(self, mark: torch.Event | None) -> None:
        if mark is not None:
            devices.stream_of_thread(self._device).wait_event(mark)
