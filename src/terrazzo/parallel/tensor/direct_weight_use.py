"""Finds models that compute with the weights of a cut module without calling the module.

`F.linear(x, self.down.weight)` would take this rank's part for the whole matrix, and what `self.down` does around its
own forward, the sum over ranks, would be missing: a number that is wrong, without a word. The first forward in each
mode is watched; compiled ones are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terrazzo.engine.runtime.compiled import compilation_of
from terrazzo.engine.runtime.overrides import function_name, is_question
from terrazzo.errors import Misuse

__all__ = ["watch_direct_use"]


def watch_direct_use(model: nn.Module, cut: Mapping[str, Sequence[str]], users: Sequence[str]) -> None:
    """Watch the first forwards of a model, which raise `Misuse` there.

    Args:
        cut: attributes of modules, by name, that hold parts.
        users: names of the modules that may compute with any of them.
    """
    watch = _FirstForwards(cut, users)
    model.register_forward_pre_hook(watch.begin, prepend=True)
    model.register_forward_hook(watch.end, always_call=True)


@dataclass
class _FirstForwards:
    """Holds names alone, so that a copy of the model has one that works.

    Attributes:
        seen: in which modes there has been a forward: whether in training, and whether with gradients.
    """

    cut: Mapping[str, Sequence[str]]
    users: Sequence[str]
    seen: set[tuple[bool, bool]] = field(default_factory=set)
    mode: _Uses | None = None

    def begin(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        key = (model.training, torch.is_grad_enabled())
        if key in self.seen or self.mode is not None:
            return
        self.seen.add(key)
        if any(compilation_of(module) is not None for module in model.modules()):
            return
        self.mode = _Uses()
        for name, attributes in self.cut.items():
            self.mode.add(name, model.get_submodule(name), attributes)
        for name in self.users:
            self.mode.allow(model.get_submodule(name))
        self.mode.begin()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.end()


class _Uses(TorchFunctionMode):
    """Sees what torch's functions are given while the modules that hold parts run, and while they do not."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._running: Counter[int] = Counter()
        self._users = 0
        self._handles: list[Any] = []

    def add(self, name: str, module: nn.Module, attributes: Sequence[str]) -> None:
        """Parameters that a module may compute with while it runs."""
        own = [id(module._parameters[attribute]) for attribute in attributes]
        self._names |= {key: f"{name}.{attribute}" for key, attribute in zip(own, attributes, strict=True)}
        self._around(module, lambda: self._running.update(own), lambda: self._running.subtract(own))

    def allow(self, module: nn.Module) -> None:
        """One that may compute with all of them."""

        def count(by: int) -> None:
            self._users += by

        self._around(module, lambda: count(1), lambda: count(-1))

    def _around(self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._handles.append(module.register_forward_pre_hook(lambda *_: before(), prepend=True))
        self._handles.append(module.register_forward_hook(lambda *_: after(), always_call=True))

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not self._users and not is_question(func):
            for value in [*args, *named.values()]:
                for each in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, Tensor) and (name := self._names.get(id(each))) and not self._running[id(each)]:
                        raise Misuse(
                            f"The model's forward computes with {name!r} ({function_name(func)}) and does not call the "
                            "module: this rank has a part of it, and the exchange with the ranks that have the rest is "
                            f"in the module's call. Call {name.rpartition('.')[0]!r} there, or give it no style in the "
                            "tensor-parallel plan."
                        )
        return func(*args, **named)
