"""What modules do to a state dict on its way in, before and after: their hooks, called as torch calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import nn

from terrazzo.errors import BadInput

__all__ = ["check_loading", "hooked_after", "hooked_before", "own_method"]


class _Edited(MutableMapping[str, Any]):
    """A state dict, maybe lazy, with the changes of hooks; the one from before stays as it was."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._before, self._changed, self._gone = state_dict, dict[str, Any](), set[str]()

    def __getitem__(self, name: str) -> Any:
        if name in self._gone:
            raise KeyError(name)
        return self._changed[name] if name in self._changed else self._before[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._gone.discard(name)
        self._changed[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._gone.add(name)
        self._changed.pop(name, None)

    def __contains__(self, name: object) -> bool:  # the inherited one would look up a lazy tensor
        return name not in self._gone and (name in self._changed or name in self._before)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._before if name not in self._gone)
        yield from (name for name in self._changed if name not in self._before)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def check_loading(model: nn.Module) -> None:
    """Refuse modules that load in a way of their own, of which nothing would be called.

    Raises:
        BadInput: a module that overrides `_load_from_state_dict`, or a model `load_state_dict`; torch's own aside.
    """
    loaders = [(name, each, "_load_from_state_dict") for name, each in model.named_modules()]
    for name, module, method in [*loaders, ("", model, "load_state_dict")]:
        own = own_method(type(module), method)
        if not getattr(own, "__module__", "").startswith("torch."):
            raise BadInput(
                f"load_state_dict: {name or 'the model'!r}, a {type(module).__name__}, has a {method} of its own, which"
                " a sharded model does not call. Do what it does in a hook, module.register_load_state_dict_pre_hook,"
                " or to the state dict before; or load before tz.shard."
            )


def own_method(kind: type, name: str) -> Any:
    """A method as a class has it without what makes a model a sharded one; None where it has none."""
    owners = (each for each in kind.__mro__ if name in vars(each) and not each.__module__.startswith("terrazzo."))
    return next((vars(each)[name] for each in owners), None)


def hooked_before(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> tuple[Mapping[str, Any], list[str]]:
    """What modules' hooks make of a state dict, and what they say is missing.

    Raises:
        BadInput: what they say is wrong.
    """
    hooks = [
        (hook, prefix)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for hook in module._load_state_dict_pre_hooks.values()
    ]
    if not hooks:
        return state_dict, []
    metadata = getattr(state_dict, "_metadata", None) or {}
    edited = _Edited(state_dict)
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    for hook, prefix in hooks:
        dotted = f"{prefix}." if prefix else ""
        hook(edited, dotted, metadata.get(prefix, {}), strict, missing, unexpected, errors)
    if errors or (strict and unexpected):
        raise BadInput(f"load_state_dict, by hooks of modules: {'; '.join([*errors, *unexpected])}.")
    return edited, missing


def hooked_after(model: nn.Module, loaded: Any) -> None:
    """Call modules' hooks with the names that were missing and unexpected; those of children first."""
    for _, module in reversed([*model.named_modules(remove_duplicate=False)]):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, loaded)
