"""Watches the first forwards of a model by a torch function mode. Compiled ones are not seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from terrazzo.engine.runtime.compiled import compilation_of

__all__ = ["ForwardWatch", "watch_first_forwards"]


class ForwardWatch(TorchFunctionMode):
    """Sees what torch's functions are given in one forward, and which modules run, by hooks that it removes."""

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

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
        for handle in self._handles:
            handle.remove()


def watch_first_forwards(model: nn.Module, build: Callable[[nn.Module], ForwardWatch]) -> None:
    """Watch the first forward in training and in evaluation, each with gradients and without.

    Args:
        build: makes the watch of a forward; holds names of modules alone, so that it works for a copy of the model.
    """
    forwards = _FirstForwards(build)
    model.register_forward_pre_hook(forwards.begin, prepend=True)
    model.register_forward_hook(forwards.end, always_call=True)


@dataclass
class _FirstForwards:
    """The hooks of one model.

    Attributes:
        seen: in which modes there has been a forward: whether in training, and whether with gradients.
    """

    build: Callable[[nn.Module], ForwardWatch]
    seen: set[tuple[bool, bool]] = field(default_factory=set)
    watch: ForwardWatch | None = None

    def begin(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mode = (model.training, torch.is_grad_enabled())
        if mode in self.seen or self.watch is not None:
            return
        self.seen.add(mode)
        if any(compilation_of(module) is not None for module in model.modules()):
            return
        self.watch = self.build(model)
        self.watch.begin()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.end()
