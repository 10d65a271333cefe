"""A model's persistent buffers by original name: state that is replicated on every rank."""

from __future__ import annotations

import torch

__all__ = ["persistent_buffers"]


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to `state_dict()`, by fully qualified name; one that is shared appears once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
