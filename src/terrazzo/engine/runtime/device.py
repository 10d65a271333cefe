"""The device of a mesh, beside its arithmetic: which one a thread uses, its streams, and pinned host memory.

`torch.cuda` stands in this module alone (`python -m tools.lint` sees to that). There are two kinds:

    cpu     a copy is over when its call returns, so streams hold nothing, and their marks are None
    cuda    NVIDIA's GPUs, and AMD's through torch's ROCm build, which answers to the same names, RCCL as `nccl`

Intel's `xpu` and Apple's `mps` are refused by `tz.shard`: streams and pinned memory have other names there, and what
nobody has run must not look as if it did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.runtime.process_groups import backends_by_device

__all__ = [
    "HOST",
    "KINDS",
    "Stream",
    "allocator",
    "backend_for",
    "count",
    "current",
    "deterministic",
    "generator_state",
    "is_cuda",
    "kind_of_group",
    "peak_bytes",
    "pin",
    "properties",
    "set_current",
    "set_generator_state",
    "synchronize",
    "unpin",
]

KINDS = ("cpu", "cuda")
HOST = torch.device("cpu")
"""Where ranks exchange the numbers that the host decides by: it need not wait there for what the device has queued."""


def is_cuda(device: torch.device) -> bool:
    """Whether work on `device` is queued in streams while the host goes on."""
    return device.type == "cuda"


def count() -> int:
    """CUDA devices that this process sees."""
    return torch.cuda.device_count()


def current(kind: str | None = None) -> torch.device:
    """This thread's device of a kind; by default of `cuda` where there is one."""
    kind = kind or ("cuda" if count() else "cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def set_current(device: torch.device) -> None:
    """Make `device` this thread's own: a fresh thread has the first one, and whatever it does starts that up."""
    if is_cuda(device):
        torch.cuda.set_device(device)


def backend_for(kind: str) -> str:
    """The backend of a process group whose ranks compute on a `kind` of device: on CUDA, gloo for the CPU as well."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def kind_of_group() -> str:
    """The kind of tensors that the default process group is for: `cuda` if it has NCCL and there is a device."""
    nccl = count() and dist.is_initialized() and "nccl" in backends_by_device().values()
    return "cuda" if nccl else "cpu"


def properties(index: int | None = None) -> Any:
    """What the driver tells of a CUDA device, by default of this thread's: name, total_memory in bytes, PCI address."""
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)


def generator_state() -> Tensor | None:
    """The state of this thread's CUDA generator, uint8 on the host; None where this process has not used one."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_generator_state(state: Tensor) -> None:
    """Set what `generator_state` gave; nothing is done where this process has not used a CUDA device."""
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Have a CUDA device add in the same order each time, inside, where torch has such a kernel; CPUs always do."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if is_cuda(device):
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if is_cuda(device):
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def peak_bytes(device: torch.device) -> int:
    """The most that tensors have held on a CUDA device."""
    return torch.cuda.max_memory_allocated(device)


def allocator(device: torch.device) -> dict[str, int]:
    """What a CUDA device's allocator has counted: bytes `reserved` at most, and `retries` after having found none.

    An allocator that is not torch's own may not count both.
    """
    stats = torch.cuda.memory_stats(device)
    names = {"reserved": "reserved_bytes.all.peak", "retries": "num_alloc_retries"}
    return {name: stats[key] for name, key in names.items() if key in stats}


# -- order -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """A queue of one device's work, while the host goes on; on a CPU all is done at once."""

    device: torch.device
    _queue: torch.cuda.Stream | None

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """The one that this thread queues its work in: the computation's, unless it is inside of another."""
        return cls(device, torch.cuda.current_stream(device) if is_cuda(device) else None)

    @classmethod
    def new(cls, device: torch.device) -> Stream:
        """A new one, beside the computation's. Make it once: fresh ones cost memory at every step."""
        return cls(device, torch.cuda.Stream(device) if is_cuda(device) else None)

    def mark(self) -> torch.Event | None:
        """The point that has been queued so far."""
        return None if self._queue is None else self._queue.record_event()

    def wait_event(self, mark: torch.Event | None) -> None:
        """Have what is queued from now on come after a mark of any stream; the host goes on."""
        if self._queue is not None and mark is not None:
            self._queue.wait_event(mark)

    def inside(self) -> AbstractContextManager[Any]:
        """Have what this thread queues inside, and the memory that it allocates there, be this stream's."""
        return contextlib.nullcontext() if self._queue is None else torch.cuda.stream(self._queue)

    @contextlib.contextmanager
    def completing(self, after: torch.Event | None) -> Iterator[None]:
        """Queue what is done inside after a mark, and return once it has ended; for threads that only copy."""
        set_current(self.device)
        with self.inside():
            self.wait_event(after)
            yield
            if self._queue is not None:
                self._queue.synchronize()


def synchronize(device: torch.device) -> None:
    """Return once everything queued on `device` is done."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


# -- pinned host memory ------------------------------------------------------------------------------------------------


def pin(memory: Tensor) -> int:
    """Lock host memory for fast copies from and to CUDA devices; returns 0, or the error of `cudaHostRegister`."""
    return int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor, device: torch.device) -> None:
    """Unlock `memory` that `pin` has locked, once `device` does not use it any more.

    Any thread may come here, and one that was never told its device would start up the first one.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()
