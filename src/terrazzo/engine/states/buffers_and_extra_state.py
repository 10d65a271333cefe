"""State that every rank holds whole beside parameters: persistent buffers, and what modules put into state dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import BadInput

__all__ = [
    "PersistentBuffer",
    "check_no_extra_state",
    "extra_state",
    "extra_state_takers",
    "persistent_buffers",
    "replace_buffers",
]


@dataclass
class PersistentBuffer:
    """A buffer and all names under which `state_dict()` lists it; the first is the one it is saved under."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def persistent_buffers(model: nn.Module) -> list[PersistentBuffer]:
    """The buffers that belong to `state_dict()`, each once however many modules share it."""
    by_tensor: dict[int, PersistentBuffer] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                buffer = by_tensor.setdefault(id(tensor), PersistentBuffer(tensor))
                buffer.names.append(f"{prefix}.{name}" if prefix else name)
    return list(by_tensor.values())


def replace_buffers(model: nn.Module, replaced: Callable[[Tensor], Tensor]) -> None:
    """Put `replaced(buffer)` in the place of each buffer, one for all modules that hold it."""
    made: dict[Tensor, Tensor] = {}  # by identity
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in made:
                    made[buffer] = replaced(buffer)
                module._buffers[name] = made[buffer]


def extra_state_takers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with their own `set_extra_state`, by the name that a state dict has for what they take."""
    return {
        f"{prefix}._extra_state" if prefix else "_extra_state": module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def extra_state(module: nn.Module) -> Any:
    """Extra state that a module puts into a state dict beside parameters and buffers; None for nothing."""
    return module.get_extra_state() if type(module).get_extra_state is not nn.Module.get_extra_state else None


def check_no_extra_state(model: nn.Module) -> None:
    """Refuse modules that would put more than parameters and buffers into a state dict.

    Raises:
        BadInput: a module whose `get_extra_state` gives something other than None.
    """
    for name, module in model.named_modules():
        if (state := extra_state(module)) is not None:
            raise BadInput(
                f"get_extra_state of {repr(name) if name else 'the model'} ({type(module).__name__}) gives a"
                f" {type(state).__name__}, which a checkpoint does not hold: it would be lost. Register tensors as"
                " buffers; or put the value into extra={...}, set it again from what load returns, and have"
                " get_extra_state return None."
            )
