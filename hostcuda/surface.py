"""What Python finds in `torch.cuda`: torch's own code over the simulated device, and a refusal of everything else."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.cuda
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams
from torch.cuda._utils import _get_device_index

from hostcuda import caching, memory
from hostcuda.library import native
from hostcuda.report import report

__all__ = ["DEVICE_BYTES", "install", "set_device_count"]

DEVICE_BYTES = 8 << 30
"""Memory that a device says it has. Nothing holds a program to it."""

CLOCK = 1e9
"""Cycles of a second, for `torch.cuda._sleep`."""

_CUDA = 1
"""`torch._C` gives streams with the number of their kind of device."""

_AS_IN_TORCH = {
    "amp", "CudaError", "DeferredCudaCallError", "StreamContext", "Stream", "Event", "check_error", "cudaStatus",
    "current_stream", "default_generators", "default_stream", "device", "device_of", "has_half", "has_magma",
    "is_tf32_supported", "jiterator", "memory", "nccl", "nvtx", "profiler", "random", "set_device", "set_stream",
    "set_sync_debug_mode", "sparse", "stream", "streams", "synchronize", "tunable", "graphs",
}  # fmt: skip
"""Names of torch.cuda that stay: data, modules, and Python code over what is simulated below."""


@dataclass(frozen=True)
class _Properties:
    name: str = "Simulated CUDA"
    total_memory: int = DEVICE_BYTES
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32
    pci_domain_id: int = 0
    pci_bus_id: int = 1
    pci_device_id: int = 0


class _Cudart:
    """CUDA's runtime API, as far as it pins memory. Results are error codes."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        native.pin(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        native.unpin(pointer)
        return 0

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"hostcuda does not simulate torch.cuda.cudart().{name}")


class _StreamBase(torch.Stream):
    """In place of `torch._C._CudaStreamBase`: torch.cuda.Stream inherits from it."""

    def __new__(cls, priority: int = 0, stream_ptr: int | None = None, **known: int) -> Any:
        if stream_ptr is not None:
            raise NotImplementedError("hostcuda does not simulate streams of other libraries")
        if "stream_id" in known:
            return super().__new__(cls, **known)
        made = super().__new__(cls, device=torch.device("cuda", native.get_device()), priority=priority)
        name = f"the stream made at {report.place().partition(' < ')[0]}"
        native.name_stream(made.device_index, made.stream_id, name.encode())
        return made

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _EventBase(torch.Event):
    """In place of `torch._C._CudaEventBase`: torch.cuda.Event inherits from it."""

    def __new__(cls, external: bool = False, **options: bool) -> Any:
        if external or options.get("interprocess"):
            raise NotImplementedError("hostcuda does not simulate events of graphs or of other processes")
        return super().__new__(cls, device=torch.device("cuda"), **options)

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds of virtual time."""
        return 1e3 * float(native.event_time_s(other.event_id) - native.event_time_s(self.event_id))


_devices = 1


def set_device_count(count: int) -> None:
    """How many devices torch.cuda counts."""
    global _devices
    _devices = count


def install() -> None:
    """Change torch.cuda for good."""
    bases = {"_CudaStreamBase": _StreamBase, "_CudaEventBase": _EventBase}
    for name, function in (bases | _bindings()).items():
        setattr(torch._C, name, function)
    streams = importlib.reload(torch.cuda.streams)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, getattr(streams, name))
    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = _exchange_device, _maybe_exchange_device
    torch.cuda._lazy_init = lambda: None
    torch.cuda._is_in_bad_fork = lambda: False
    torch.backends.cuda.is_built = lambda: True
    simulated = _functions()
    for name in torch.cuda.__all__:
        if name in simulated:
            _replace(name, simulated[name])
        elif name not in _AS_IN_TORCH and not name.endswith(("Storage", "Tensor")):
            _replace(name, _refusal(name, getattr(torch.cuda, name)))
    torch.UntypedStorage.resize_ = _resizing(torch.UntypedStorage.resize_)  # type: ignore[method-assign]


def _replace(name: str, value: Any) -> None:
    """In torch.cuda, and in the module there that it comes from."""
    before = getattr(torch.cuda, name, None)
    modules = [module for module in vars(torch.cuda).values() if isinstance(module, ModuleType)]
    for module in [module for module in modules if module.__name__.startswith("torch.cuda.")]:
        if before is not None and getattr(module, name, None) is before:
            setattr(module, name, value)
    setattr(torch.cuda, name, value)


def _refusal(name: str, original: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"hostcuda does not simulate torch.cuda.{name}")

    return type(name, (), {"__init__": refuse}) if isinstance(original, type) else refuse


def _exchange_device(device: int) -> int:
    before: int = native.get_device()
    if device >= 0:
        native.set_device(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    before: int = native.get_device()
    if device >= 0:
        native.go_back_to_device(device)
    return before


def _set_stream(stream_id: int = 0, device_index: int = 0, device_type: int = _CUDA) -> None:
    if native.get_device() != device_index:  # as THCPModule_setStream_wrap does
        native.set_device(device_index)
    native.set_stream(device_index, stream_id)


def _bindings() -> dict[str, Callable[..., Any]]:
    """What torch.cuda's Python code calls in `torch._C`."""
    return {
        "_cuda_getDevice": lambda: native.get_device(),
        "_cuda_setDevice": lambda device: native.set_device(device),
        "_cuda_getDeviceCount": lambda: _devices,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _maybe_exchange_device,
        "_cuda_setStream": _set_stream,
        "_cuda_getCurrentStream": lambda device: (native.get_stream(device), device, _CUDA),
        "_cuda_getCurrentRawStream": lambda device: native.get_stream(device),
        "_cuda_getDefaultStream": lambda device: (0, device, _CUDA),
        "_cuda_sleep": lambda cycles: native.sleep(_index(), native.get_stream(_index()), cycles / CLOCK),
        "_cuda_set_sync_debug_mode": report.warn_of_syncs,
        "_cuda_synchronize": lambda: native.synchronize(native.get_device()),
    }


def _index(device: Any = None) -> int:
    return int(_get_device_index(device, optional=True))


def _functions() -> dict[str, Callable[..., Any]]:
    """Names of torch.cuda with other code than torch's. There is one random generator, the host's."""
    properties = _Properties()
    generator = torch.default_generator
    return {
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: _devices,
        "current_device": lambda: native.get_device(),
        "cudart": _Cudart,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda device=None: native.allocated(_index(device)),
        "max_memory_allocated": lambda device=None: native.peak(_index(device)),
        "memory_stats": lambda device=None: {"num_alloc_retries": 0},  # memory never runs out
        "memory_reserved": lambda device=None: _held()[-1].reserved,
        "max_memory_reserved": lambda device=None: caching.peak(_held()).reserved,
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(_index(device)),
        "reset_max_memory_allocated": lambda device=None: native.reset_peak(_index(device)),
        "mem_get_info": lambda device=None: (DEVICE_BYTES - native.allocated(_index(device)), DEVICE_BYTES),
        "empty_cache": lambda: None,
        "initial_seed": lambda: generator.initial_seed(),
        "manual_seed": lambda seed: generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: generator.manual_seed(seed) and None,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()] * _devices,
        "set_rng_state": lambda state, device="cuda": generator.set_state(state) and None,
        "set_rng_state_all": lambda states: generator.set_state(states[native.get_device()]) and None,
    }


def _held() -> Sequence[caching.Held]:
    """After each event of what is recorded (`hostcuda.memory.begin`); segments are as the environment asks."""
    if not memory.count():
        raise NotImplementedError("hostcuda knows what is reserved once hostcuda.memory.begin() was called")
    return list(caching.replay(memory.events(), "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")))


def _resizing(original: Any) -> Any:
    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return original(self, size)  # type: ignore[no-any-return]
        over = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,), (1,))
        torch.ops.hostcuda.resize_storage(over, int(size))  # an operator takes no storage, only a tensor over it
        return self

    return resize_
