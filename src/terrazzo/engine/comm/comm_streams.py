"""Communication streams: chains of collectives run on them on CUDA; on CPU the host does the work itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream

__all__ = ["CommStreams", "comm_streams_of"]

T = TypeVar("T")


def comm_streams_of(device: torch.device, backends: Collection[str]) -> CommStreams | None:
    """The communication streams of a mesh on `device`; None where the host does the work, or waits for it.

    Args:
        backends: of the mesh's axes. `fake` moves nothing, so nobody waits: dry runs are queued as on CUDA.
    """
    return CommStreams(device) if devices.is_cuda(device) or "fake" in backends else None


class CommStreams:
    """The communication streams of one mesh.

    Chains of collectives run one after the other on the first stream, which owns the memory that they allocate. A chain
    may continue on further streams: so a sum between machines, or a division, does not delay the gathers and sums
    inside of a machine that come next.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = self._user = Stream.new(device)
        self._further: list[Stream] = []

    @contextlib.contextmanager
    def chain(self) -> Iterator[None]:
        """Queue what is done inside on the first stream, after all that the computation has queued."""
        self._user = self._computation
        self._stream.wait_event(self._user.mark())
        with self._stream.inside():
            yield

    @contextlib.contextmanager
    def further(self, index: int) -> Iterator[None]:
        """Queue work on a further stream, after the chain that this is called in; other chains do not wait for it.

        Args:
            index: of the further streams, which one chain takes in order.
        """
        if index == len(self._further):
            self._further.append(Stream.new(self._stream.device))
        self._further[index].wait_event(self.mark())
        with self._further[index].inside():
            yield

    def for_computation(self) -> AbstractContextManager[Any]:
        """Have memory that is allocated inside belong to the computation's stream; to be called inside of `chain`."""
        return self._user.inside()

    def lend(self, make: Callable[[], T]) -> T:
        """Have `make` allocate memory of the first stream, which the computation may use after all chains so far."""
        with self.chain():
            made = make()
            mark = self.mark()
        self.wait(mark)
        return made

    def mark(self) -> torch.Event | None:
        """An event at the end of what is queued now, inside of `chain` or `further`."""
        return Stream.current(self._stream.device).mark()

    def wait(self, mark: torch.Event | None) -> None:
        """Have the computation's stream wait for an event of `mark`."""
        self._computation.wait_event(mark)

    @property
    def _computation(self) -> Stream:
        return Stream.current(self._stream.device)
