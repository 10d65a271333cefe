"""What gives modules on the meta device first values: `reset_parameters`, and `_init_weights` of a model around."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import BadInput

__all__ = ["Initializer", "check_initializable", "initializers_of", "on_meta"]


@dataclass(frozen=True, eq=False)
class Initializer:
    """What gives one module first values: of what it owns, and of what it sets of its children behind them.

    Attributes:
        name: of the module in the model.
        owner: the innermost of the modules around it, and itself, with an `_init_weights`: of models in a model, such
            as an encoder of another library in one's own, each is asked for what is its own. None where none has it.
        unit: the innermost unit around it.
    """

    name: str
    module: nn.Module
    owner: nn.Module | None
    unit: nn.Module

    @property
    def by_itself(self) -> Callable[..., object] | None:
        """Its `reset_parameters`."""
        return _method(self.module, "reset_parameters")

    @property
    def by_owner(self) -> Callable[..., object] | None:
        """`_init_weights` of the model around it."""
        return None if self.owner is None else _method(self.owner, "_init_weights")

    @property
    def owns_tensors(self) -> bool:
        return bool(self.module._parameters or self.module._buffers)

    def construct(self) -> None:
        """Set values as its constructor does."""
        if (reset := self.by_itself) is not None and (self.owns_tensors or _takes(reset)):
            with _without_resets(self.module):
                reset()

    def initialize(self) -> None:
        """Set values as its model does behind all constructors, which has the last word."""
        if (by_owner := self.by_owner) is not None:
            by_owner(self.module)

    def check(self) -> None:
        """Refuse a module with tensors of its own that there is nothing to initialise by.

        Raises:
            BadInput: there.
        """
        kind = type(self.module).__name__
        if self.by_itself is None and self.by_owner is None:
            raise BadInput(
                f"{kind} was built on the meta device and has no reset_parameters() to give its parameters and buffers "
                "values. Add that method, or build the model on a real device."
            )
        if self.by_itself is not None and not _takes(self.by_itself):
            raise BadInput(
                f"{kind} was built on the meta device, and its reset_parameters() asks for arguments, of which none is "
                "known. Give them defaults, or build the model on a real device."
            )
        if self.by_owner is not None and not _takes(self.by_owner, self.module):
            raise BadInput(
                f"{kind} was built on the meta device, and _init_weights() of {type(self.owner).__name__} cannot be "
                "called with a module, as those of transformers are, to set what that owns. Have it take one, or give "
                "it another name; or build the model on a real device."
            )


def initializers_of(model: nn.Module, units: Collection[nn.Module] = ()) -> Iterator[Initializer]:
    """Give every module's, children first: as constructors run, and `Module.apply`."""
    yield from _below("", model, None, model, units, set())


def _below(
    name: str, module: nn.Module, owner: nn.Module | None, unit: nn.Module, units: Collection[nn.Module], seen: set[Any]
) -> Iterator[Initializer]:
    seen.add(module)
    owner = module if _method(module, "_init_weights") is not None else owner
    unit = module if module in units else unit
    for attribute, child in module.named_children():
        if child not in seen:
            yield from _below(f"{name}.{attribute}" if name else attribute, child, owner, unit, units, seen)
    yield Initializer(name, module, owner, unit)


def check_initializable(model: nn.Module) -> None:
    """Refuse meta parameters or buffers in a module that has no way to initialise them.

    Raises:
        BadInput: there.
    """
    for each in initializers_of(model):
        if on_meta(each.module._parameters) or on_meta(each.module._buffers):
            each.check()


def on_meta(tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether one of these is on the meta device."""
    return any(tensor is not None and tensor.is_meta for tensor in tensors.values())


def _method(module: nn.Module, name: str) -> Callable[..., object] | None:
    """A method that is the module's own: a wrapper's `__getattr__` may show those of what it wraps."""
    has = name in vars(module) or hasattr(type(module), name)
    return found if has and callable(found := getattr(module, name)) else None


@contextlib.contextmanager
def _without_resets(module: nn.Module) -> Iterator[None]:
    """Have a `reset_parameters` that calls those of its children set what it changes itself: they are called before."""
    below = [each for each in module.modules() if each is not module and _method(each, "reset_parameters") is not None]
    before = [vars(each).get("reset_parameters") for each in below]
    for each in below:
        vars(each)["reset_parameters"] = _only_with_arguments(each.reset_parameters)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for each, own in zip(below, before, strict=True):
            if own is None:
                del vars(each)["reset_parameters"]
            else:
                vars(each)["reset_parameters"] = own


def _only_with_arguments(reset: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **kwargs: reset(*args, **kwargs) if args or kwargs else None


def _takes(function: Callable[..., object], *args: object) -> bool:
    """Whether a function can be called with these arguments alone."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # it does not say
        return True
    return True
