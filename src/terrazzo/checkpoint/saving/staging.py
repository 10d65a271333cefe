"""Memory that a rank copies its state into, and that the process which writes it sees too."""

from __future__ import annotations

import mmap
import os
from ctypes import memmove

import torch

from terrazzo.checkpoint.saving.snapshot import Snapshot
from terrazzo.engine.runtime import device as devices

__all__ = ["Staging"]


class Staging:
    """Memory without a name that the writer sees too, as large as the largest save so far.

    It is pinned for copies from CUDA devices where the system allows it; they are only slower where it does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.descriptor = os.memfd_create("terrazzo-checkpoint", os.MFD_CLOEXEC)
        self._device = device
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def grow(self, size_bytes: int) -> None:
        """Make room. Raises `OSError` where there is none."""
        if size_bytes > self._memory.nbytes:
            os.posix_fallocate(self.descriptor, 0, size_bytes)  # now, and not as a fault in the middle of a copy
            self._let_go()
            self._memory = torch.frombuffer(mmap.mmap(self.descriptor, size_bytes), dtype=torch.uint8)
            self._pinned = devices.is_cuda(self._device) and devices.pin(self._memory) == 0

    def copy(self, snapshot: Snapshot) -> None:
        """The bytes of all entries, at their offsets."""
        start = self._memory.data_ptr()
        for entry in snapshot.job.entries:
            first, last = entry.offset, entry.offset + entry.count_bytes
            tensor = snapshot.tensors[entry.key]().contiguous()
            assert tensor.nbytes == last - first
            if tensor.is_cpu:
                memmove(start + first, tensor.data_ptr(), last - first)  # a fifth less of a core's time than copy_
            else:
                self._memory[first:last].view(tensor.dtype).copy_(tensor, non_blocking=self._pinned)
        if (copied := devices.Stream.current(self._device).mark()) is not None:
            copied.synchronize()

    def close(self) -> None:
        self._let_go()
        os.close(self.descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: the pages are pinned for the parent's device."""
        self._pinned = False
        self.close()

    def _let_go(self) -> None:
        if self._pinned:
            devices.unpin(self._memory, self._device)
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False
