"""Host memory that is lent, comes back, and is lent again, for tensors that leave the device in each step."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque

import torch
from torch import Tensor

from terrazzo.engine.offload.host_arena import HostArena

__all__ = ["HostBuffer", "HostPool"]


class HostBuffer:
    """A piece of host memory on loan from a pool: it goes back there when this object is gone."""

    def __init__(self, pool: HostPool, arena: HostArena, memory: Tensor) -> None:
        self._pool, self._arena, self._memory = pool, arena, memory

    def __del__(self) -> None:
        self._pool.returned.append((self._arena, self._memory))

    def shaped(self, like: Tensor) -> Tensor:
        """The buffer's first bytes as a tensor with the shape, strides and dtype of `like`."""
        return torch.as_strided(self._memory[: like.nbytes].view(like.dtype), like.shape, like.stride())


class HostPool:
    """Buffers that are lent, come back, and are lent again: none is allocated in a step once sizes repeat.

    A request gets the smallest idle buffer that is large enough. Where none is, a new one takes the place of the
    largest idle one: with batches of changing lengths the pool ends up with as many buffers as are in use at once, each
    as large as the longest batch needs, and stays there.

    Whoever returns a buffer while a copy from or to it is under way must make later users of this pool wait for it, for
    instance by copying on one stream only.

    Args:
        pin_for: see `HostArena`.

    Attributes:
        total_bytes: lent and idle together.
    """

    def __init__(self, pin_for: torch.device | None) -> None:
        self._pin_for = pin_for
        self._lock = threading.Lock()
        self._idle: list[tuple[HostArena, Tensor]] = []  # by size
        # Buffers come back from destructors, which run anywhere, also inside `take`: no lock there.
        self.returned: deque[tuple[HostArena, Tensor]] = deque()
        self.total_bytes = 0

    def borrow(self, count_bytes: int) -> HostBuffer:
        """A buffer of `count_bytes` or more, with anything in it."""
        with self._lock:
            while self.returned:
                entry = self.returned.popleft()
                self._idle.insert(bisect_left(self._idle, _size(entry), key=_size), entry)
            position = bisect_left(self._idle, count_bytes, key=_size)
            if position < len(self._idle):
                return HostBuffer(self, *self._idle.pop(position))
            if self._idle:
                self._drop(self._idle.pop())
            arena = HostArena(count_bytes, self._pin_for)
            self.total_bytes += arena.size_bytes
            return HostBuffer(self, arena, arena.allocate(arena.size_bytes))

    def _drop(self, entry: tuple[HostArena, Tensor]) -> None:
        self.total_bytes -= _size(entry)
        entry[0].close()


def _size(entry: tuple[HostArena, Tensor]) -> int:
    return entry[0].size_bytes
