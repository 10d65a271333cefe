"""Watches the first forwards of a model: in training and in evaluation, each with gradients and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from terrazzo.engine.runtime.compiled import compilation_of

__all__ = ["BuildWatch", "ForwardWatch", "FunctionWatch", "has_compiled", "watch_first_forwards"]


class ForwardWatch:
    """Looks at one forward of a model."""

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The forward begins with these arguments."""

    def succeed(self, output: Any) -> None:
        """The forward has returned this."""

    def close(self) -> None:
        """The forward has returned or raised."""


class FunctionWatch(TorchFunctionMode, ForwardWatch):
    """Sees what torch's functions are given, and which modules run, by hooks that it removes.

    What a compiler traces is not seen, such as a compiled function of the model, which would compile the watch, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[Any] = []

    def before(self, module: nn.Module, action: Callable[[Any, Any], None], first: bool = False) -> None:
        """Call `action` with a module's arguments before it runs, `first`: before all other hooks."""
        hook: Any = lambda module, args, kwargs: action(args, kwargs)  # noqa: E731
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))

    def after(self, module: nn.Module, action: Callable[[Any], None], always: bool = False) -> None:
        """Call `action` with a module's output behind all other hooks, `always`: with None where it has raised."""
        hook: Any = lambda module, args, output: action(output)  # noqa: E731
        self._handles.append(module.register_forward_hook(hook, always_call=always))

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call one of torch's functions, for its result."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.called(func, args, kwargs or {})

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def close(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
        for handle in self._handles:
            handle.remove()


BuildWatch = Callable[[nn.Module], ForwardWatch | None]
"""Makes the watch of the forward that begins, or None where it would see nothing. It holds names of modules alone, so
that it works for a copy of the model."""


def has_compiled(model: nn.Module) -> bool:
    """Whether parts of a model are compiled, inside of which a `FunctionWatch` sees nothing."""
    return any(compilation_of(module) is not None for module in model.modules())


def watch_first_forwards(model: nn.Module, builds: Sequence[BuildWatch]) -> None:
    """Watch the first forward of each kind that returns. One that raises leaves its kind to the next.

    Forwards inside of a compiled graph are not seen.
    """
    forwards = _FirstForwards(builds)
    model.register_forward_pre_hook(forwards.begin, prepend=True, with_kwargs=True)
    model.register_forward_hook(forwards.succeed)
    model.register_forward_hook(forwards.close, always_call=True)


@dataclass
class _FirstForwards:
    """The hooks of one model.

    Attributes:
        seen: the kinds of forwards that there have been: whether in training, and whether with gradients.
        watches: those of the forward that runs, which have begun.
    """

    builds: Sequence[BuildWatch]
    seen: set[tuple[bool, bool]] = field(default_factory=set)
    watches: list[ForwardWatch] = field(default_factory=list)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._close_all()  # torch calls no hooks behind a KeyboardInterrupt
        for build in () if _kind_of(model) in self.seen else self.builds:
            if (watch := build(model)) is not None:
                watch.begin(args, kwargs)
                self.watches.append(watch)

    def succeed(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for watch in self.watches:
            watch.succeed(output)
        self.seen.add(_kind_of(model))

    def close(self, model: nn.Module, args: Any, output: Any) -> None:
        """Runs also where the forward has raised."""
        if not torch.compiler.is_compiling():
            self._close_all()

    def _close_all(self) -> None:
        while self.watches:
            self.watches.pop().close()


def _kind_of(model: nn.Module) -> tuple[bool, bool]:
    return model.training, torch.is_grad_enabled()
