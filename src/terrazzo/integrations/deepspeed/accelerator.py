"""`deepspeed.accelerator`: the device that this process trains on, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.engine.runtime import device as devices

__all__ = ["get_accelerator", "local_device"]

_ELSE = {
    "empty_cache": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "is_bf16_supported": True,
    "is_fp16_supported": True,
}
"""What torch.cuda, torch.cpu or torch cannot be asked, with the answer."""


class _Accelerator:
    """Answers as `torch.cuda` where there are GPUs, else as `torch.cpu`; what is said here goes first."""

    def __init__(self) -> None:
        self._name = devices.current().type

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda:1`, or without an index `cuda`; always `cpu` on a CPU."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return str(local_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def __getattr__(self, name: str) -> Any:
        for module in (getattr(torch, self._name), torch):
            if hasattr(module, name):
                return getattr(module, name)
        if name in _ELSE:
            return lambda *args: _ELSE[name]
        raise AttributeError(f"get_accelerator() has no {name!r} here: torch.{self._name} has none.")


_ACCELERATOR = _Accelerator()


def get_accelerator() -> _Accelerator:
    """The device that this process trains on."""
    return _ACCELERATOR


def local_device() -> torch.device:
    """This rank's device."""
    return devices.current()
