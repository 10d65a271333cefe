"""Where chains of collectives run: beside the computation, or in step with it where the host does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream

__all__ = ["Side", "side_of"]

T = TypeVar("T")


def side_of(device: torch.device, backends: Collection[str]) -> Side | None:
    """The side of a mesh on `device`; None where the host itself does the work, or waits for it.

    Args:
        backends: of the mesh's axes. `fake` moves nothing, so nobody waits: steps on paper are queued as on CUDA.
    """
    return Side(device) if devices.is_cuda(device) or "fake" in backends else None


class Side:
    """Whole chains, one after the other, on a stream of their own. Memory that they allocate for themselves is its.

    What a chain goes on with has further streams, if it says so: a sum between machines, or a division, does not keep
    gathers and sums inside of a machine waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = self._user = Stream.beside(device)
        self._further: list[Stream] = []

    @contextlib.contextmanager
    def chain(self) -> Iterator[None]:
        """What is queued inside comes after all that the computation has queued, and before what waits for `mark`."""
        self._user = self._computation
        self._stream.wait_event(self._user.mark())
        with self._stream.inside():
            yield

    @contextlib.contextmanager
    def further(self, count: int) -> Iterator[None]:
        """Inside of `chain`: what is queued inside comes after what the chain has queued; other chains need not wait.

        Args:
            count: how often this chain has gone further before.
        """
        if count == len(self._further):
            self._further.append(Stream.beside(self._stream.device))
        self._further[count].wait_event(self.mark())
        with self._further[count].inside():
            yield

    def home(self) -> AbstractContextManager[Any]:
        """Inside of `chain`: memory that is allocated here is the computation's."""
        return self._user.inside()

    def lend(self, make: Callable[[], T]) -> T:
        """What `make` allocates is the side's memory; the computation may use it, after all chains so far."""
        with self.chain():
            made = make()
            mark = self.mark()
        self.wait(mark)
        return made

    def mark(self) -> torch.Event | None:
        """Inside of `chain` or `further`: its end."""
        return Stream.current(self._stream.device).mark()

    def wait(self, mark: torch.Event | None) -> None:
        """The computation waits for a mark."""
        self._computation.wait_event(mark)

    @property
    def _computation(self) -> Stream:
        return Stream.current(self._stream.device)
