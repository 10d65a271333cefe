"""Peak memory of this process: on the CUDA device where there is one, else resident memory."""

from __future__ import annotations

import resource
import sys

import torch

__all__ = ["PeakMemory"]


class PeakMemory:
    """The highest memory use since the start of the run, in bytes; `device` is where the model lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def peak_bytes(self) -> int:
        """CUDA: bytes held by tensors at the peak. CPU: peak resident bytes of the process, libraries included."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage if sys.platform == "darwin" else usage * 1024
