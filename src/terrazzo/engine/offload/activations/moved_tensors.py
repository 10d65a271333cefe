"""Tensors that go to host memory and come back: the way there, a copy under way, and one tensor that has been moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from terrazzo.engine.offload.activations.host_pool import HostPool
from terrazzo.engine.runtime.device import Stream
from terrazzo.errors import Misuse

__all__ = ["Copy", "Moved", "Route"]


class Route:
    """The way between one device and host memory: a pool there, and a stream for copies both ways."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device = device
        self.stream, self.pool = Stream.new(device), HostPool(device if pin else None)

    def copy(self, source: Tensor, target: Tensor) -> Copy:
        """Start copying what this thread's stream has written by then."""
        user = Stream.current(self.device)
        self.stream.wait_event(user.mark())
        with self.stream.inside():
            target.copy_(source, non_blocking=True)
        return Copy(user, self.stream.mark())


@dataclass(frozen=True)
class Copy:
    """A copy under way, and the stream that the tensor on the device belongs to."""

    user: Stream
    done: torch.Event | None

    def wait(self) -> None:
        """Make that stream wait for the copy: from now on it may use the tensor, or its memory for another one."""
        self.user.wait_event(self.done)

    @property
    def is_for_this_stream(self) -> bool:
        return self.user == Stream.current(self.user.device)


class Moved:
    """One tensor in host memory.

    Attributes:
        awaited: how many have kept it and not asked for it since.
    """

    def __init__(self, tensor: Tensor, route: Route) -> None:
        self.route, self.awaited = route, 0
        self._storage, self._version = StorageWeakRef(tensor.untyped_storage()), tensor._version
        self._here: Tensor | None = tensor.detach()  # the original, until it is let go, or a copy of it
        self._is_original, self._was_changed = True, False
        self._copy: Copy | None = None
        self._buffer = route.pool.borrow(tensor.nbytes)
        self._host = self._buffer.shaped(tensor)
        self._copy = route.copy(self._here, self._host)

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Free the memory on the device, for what comes after the copies from and to it."""
        if self._is_original and self._here is not None:
            self._was_changed |= self._here._version != self._version
        if self._copy is not None:
            self._copy.wait()
        self._here, self._copy, self._is_original = None, None, False

    def fetch(self) -> None:
        """Start bringing the tensor back, unless it is here or on its way."""
        if self._here is None:
            host = self._host
            self._here = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.route.device)
            self._copy = self.route.copy(self._host, self._here)

    def get(self) -> Tensor:
        """The tensor, for the stream of this thread. It stays here for others that have kept it."""
        if self._copy is not None and not self._copy.is_for_this_stream:
            self.leave()
        self.fetch()
        on_device = self._here
        assert on_device is not None
        if self._was_changed or (self._is_original and on_device._version != self._version):
            raise Misuse(
                f"The input of a checkpointed unit, of shape {tuple(self._host.shape)}, was changed in place after the "
                "unit had begun, and backward needs the values that it had: replace the in-place operation, or clone "
                "the tensor before."
            )
        if self._copy is not None:
            self._copy.wait()
        self.awaited -= 1
        if self.awaited <= 0:
            self.leave()
        return on_device
