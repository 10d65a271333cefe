"""What stands in a module's `__dict__` in place of a method of its class."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from terrazzo.errors import Misuse

__all__ = ["MethodReplacement", "function_of", "replaced_of"]


class MethodReplacement(ABC):
    """What a module has in place of a method, and calls that method in a way of its own.

    The module owns this, which therefore holds it weakly: a module that were held would be freed by the garbage
    collector alone. A copy of the module, and one that is unpickled, get a replacement of their own: `__reduce__` says
    of what, the module among it.

    Args:
        module: whose method it is.
        name: of the method.
        replaced: what is called, as of `replaced_of`.
    """

    def __init__(self, module: nn.Module, name: str, replaced: Callable[..., Any] | None) -> None:
        self._module, self.name, self.replaced = weakref.ref(module), name, replaced
        self._function = _own_method(module, name) if replaced is None else None

    @property
    def module(self) -> nn.Module:
        """The module whose method it is.

        Raises:
            Misuse: where it is gone.
        """
        if (module := self._module()) is None:
            raise Misuse(
                f"A {self.name} was called of a module that is gone, because nobody kept it: keep the module, or the "
                f"model that it is in, and not its {self.name} alone."
            )
        return module

    def bound(self) -> Callable[..., Any]:
        """The method that is replaced, as the module would have it."""
        if self.replaced is not None:
            return self.replaced
        assert self._function is not None, "the class has it"
        return MethodType(self._function, self.module)

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]: ...

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.bound())


def replaced_of(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """What is replaced at `module.name`: None for the method that its class has; else what stands there itself."""
    own = inspect.getattr_static(type(module), name, None)
    return None if name not in vars(module) and isinstance(own, FunctionType) else getattr(module, name)


def function_of(module: nn.Module, name: str, replaced: Callable[..., Any] | None) -> Callable[..., Any]:
    """What is replaced as a function of the module as well, which holds none: one for all modules of a class."""
    if replaced is None:
        return _own_method(module, name)

    def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return replaced(*args, **kwargs)

    called.__dict__.update(getattr(replaced, "__dict__", {}))  # which may tell that it is compiled
    return called


def _own_method(module: nn.Module, name: str) -> Callable[..., Any]:
    method: FunctionType = inspect.getattr_static(type(module), name)
    return method
