"""The device of a mesh, beside its arithmetic: threads that stand on it, streams, events and pinned host memory.

`torch.cuda` stands in this module alone (`tools/lint_structure.py` sees to that). There are two kinds:

    cpu     a copy is over when its call returns, so there are no streams: they are None
    cuda    NVIDIA's GPUs, and AMD's through torch's ROCm build, which answers to the same names, RCCL as `nccl`

Intel's `xpu` and Apple's `mps` are refused by `tz.shard`: streams and pinned memory have other names there, and what
nobody has run must not look as if it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "KINDS",
    "backend_for",
    "count",
    "generator_state",
    "here",
    "is_cuda",
    "kind_of_group",
    "mark",
    "on_stream",
    "peak_bytes",
    "pin",
    "properties",
    "set_generator_state",
    "side_stream",
    "stacked",
    "stand_on",
    "stream_of_thread",
    "synchronize",
    "unpin",
]

KINDS = ("cpu", "cuda")


def is_cuda(device: torch.device) -> bool:
    """Whether work on `device` is queued in streams while the host goes on."""
    return device.type == "cuda"


def count() -> int:
    """CUDA devices that this process sees."""
    return torch.cuda.device_count()


def here(kind: str | None = None) -> torch.device:
    """This thread's device of a kind; by default of `cuda` where there is one."""
    kind = kind or ("cuda" if count() else "cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def stand_on(device: torch.device) -> None:
    """Make `device` this thread's own: a fresh thread stands on the first one, and whatever it does starts that up."""
    if is_cuda(device):
        torch.cuda.set_device(device)


def backend_for(kind: str) -> str:
    """The backend of a process group whose ranks compute on a `kind` of device: on CUDA, gloo for the CPU as well."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


def kind_of_group() -> str:
    """Of the tensors that the default process group is for: `cuda` if it has NCCL and there is a device."""
    nccl = count() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return "cuda" if nccl else "cpu"


def properties(index: int | None = None) -> Any:
    """What the driver tells of a CUDA device, by default of this thread's: name, total_memory in bytes, PCI address."""
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)


def generator_state() -> Tensor | None:
    """Of random numbers on this thread's CUDA device, uint8 on the host; None where this process has not used one."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_generator_state(state: Tensor) -> None:
    """The reverse; nothing is done where this process has not used a CUDA device."""
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state)


def peak_bytes(device: torch.device) -> int:
    """The most that tensors have held on a CUDA device."""
    return torch.cuda.max_memory_allocated(device)


# -- order -------------------------------------------------------------------------------------------------------------


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream beside the computation's. Make it once: fresh ones cost memory at every step."""
    return torch.cuda.Stream(device) if is_cuda(device) else None


def stream_of_thread(device: torch.device) -> torch.cuda.Stream:
    """The stream that this thread queues work of a CUDA device in."""
    return torch.cuda.current_stream(device)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Work inside is queued in `stream`."""
    return torch.cuda.stream(stream)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The point that this thread's stream has reached; None on a CPU, where all is done."""
    return torch.cuda.current_stream(device).record_event() if is_cuda(device) else None


def synchronize(device: torch.device) -> None:
    """Return once everything queued on `device` is done."""
    if is_cuda(device):
        torch.cuda.synchronize(device)


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-d tensors as one of [len(values)] on `device`; what lies on the host gets there in one copy, and comes last."""
    parts = ([value for value in values if (value.device == device) is there] for there in (True, False))
    return torch.cat([torch.stack(part).to(device) for part in parts if part])


# -- pinned host memory ------------------------------------------------------------------------------------------------


def pin(memory: Tensor) -> int:
    """Lock host memory for fast copies from and to CUDA devices; returns 0, or the error of `cudaHostRegister`."""
    return int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor, device: torch.device) -> None:
    """The reverse, once `device` does not use it any more.

    Any thread may come here, and one that was never told its device would start up the first one.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()
