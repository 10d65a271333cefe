"""Finds models that compute with the weights of a cut module without calling the module.

`F.linear(x, self.down.weight)` would take this rank's part for the whole matrix, and miss the sum over ranks that is
around the forward of `self.down`: a number that is wrong, without an error. First forwards are watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.runtime.overrides import arguments, function_name, is_question
from terrazzo.errors import Misuse
from terrazzo.parallel.tensor.first_forwards import FunctionWatch, has_compiled

__all__ = ["DirectUse"]


@dataclass(frozen=True)
class DirectUse:
    """Builds a watch of a forward, which raises `Misuse` there.

    Attributes:
        cut: attributes of modules, by name, that hold parts.
        users: names of the modules that may compute with any of them.
    """

    cut: Mapping[str, Sequence[str]]
    users: Sequence[str]

    def __call__(self, model: nn.Module) -> FunctionWatch | None:
        if has_compiled(model):
            return None
        watch = _DirectUse()
        for name, attributes in self.cut.items():
            watch.add(name, model.get_submodule(name), attributes)
        for name in self.users:
            watch.allow(model.get_submodule(name))
        return watch


class _DirectUse(FunctionWatch):
    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._running: Counter[int] = Counter()
        self._users = 0

    def add(self, name: str, module: nn.Module, attributes: Sequence[str]) -> None:
        """Parameters that a module may compute with while it runs."""
        own = [id(module._parameters[attribute]) for attribute in attributes]
        self._names |= {key: f"{name}.{attribute}" for key, attribute in zip(own, attributes, strict=True)}
        self.before(module, lambda *_: self._running.update(own), first=True)
        self.after(module, lambda _: self._running.subtract(own), always=True)

    def allow(self, module: nn.Module) -> None:
        """A module that may compute with all of them."""

        def count(by: int) -> None:
            self._users += by

        self.before(module, lambda *_: count(1), first=True)
        self.after(module, lambda _: count(-1), always=True)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._users and not is_question(func):
            for each in arguments(args, kwargs):
                if isinstance(each, Tensor) and (name := self._names.get(id(each))) and not self._running[id(each)]:
                    raise Misuse(
                        f"The model's forward computes with {name!r} ({function_name(func)}) and does not call the "
                        "module: this rank has a part of it, and the exchange with the ranks that have the rest is in "
                        f"the module's call. Call {name.rpartition('.')[0]!r} there, or give it no style in the "
                        "tensor-parallel plan."
                    )
        return func(*args, **(kwargs or {}))
