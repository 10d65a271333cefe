"""Persistent buffers, which every rank holds whole, and their names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["PersistentBuffer", "persistent_buffers"]


@dataclass
class PersistentBuffer:
    """A buffer and all names under which `state_dict()` lists it; the first is the one it is saved under."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def persistent_buffers(model: torch.nn.Module) -> list[PersistentBuffer]:
    """The buffers that belong to `state_dict()`, each once however many modules share it."""
    by_tensor: dict[int, PersistentBuffer] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                buffer = by_tensor.setdefault(id(tensor), PersistentBuffer(tensor))
                buffer.names.append(f"{prefix}.{name}" if prefix else name)
    return list(by_tensor.values())
