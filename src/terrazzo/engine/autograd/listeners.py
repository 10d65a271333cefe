"""The functions that torch calls: each reaches whom it tells, hooks of its model say, through a weak reference.

Those of modules stay out of compiled graphs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from terrazzo.engine.runtime.private_torch import graph_task, uncompiled

__all__ = ["before_gradient", "eager", "inside_backward", "on_backward"]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a hook of a module, called between compiled graphs; copies and pickles of the module do without."""
    made: Callable[..., Any] = _kind_of_hooks()(function)
    return made


@functools.cache
def _kind_of_hooks() -> type:
    """Made when it is first asked for: torch's compiler takes seconds to load."""

    class Hook:
        def __init__(self, function: Callable[..., Any]) -> None:
            self._function = function

        @uncompiled
        def __call__(self, *args: Any, **named: Any) -> Any:
            return self._function(*args, **named)

        def __reduce__(self) -> Any:
            return _hook_of_a_copy, ()

    return Hook


def _hook_of_a_copy() -> Callable[..., None]:
    return _tell_nobody


def _tell_nobody(*args: Any, **named: Any) -> None:
    """What a copied or pickled module has for a hook: its weights are its own."""


def inside_backward() -> bool:
    """Whether backward has called what runs now on this thread."""
    return graph_task() != -1


class BackwardListener(Protocol):
    """Hears of the backwards of one model: its `BackwardHooks`."""

    def start(self) -> object:
        """Return the backward that is under way, which may begin with this call."""

    def enter(self, index: int, generation: int, forward: int) -> None:
        """A backward comes to a call of a unit; arguments as of `on_backward`."""


def on_backward(listener: BackwardListener, index: int, generation: int, forward: int) -> Callable[[Any], None]:
    """Tell `listener`, once per backward, that this has reached one call of a unit, whichever of its outputs first.

    Args:
        index: of the unit.
        generation: of its weights at the time of the call.
        forward: number of the model's forward that the call was in.
    """
    reference = weakref.ref(listener)
    last_entered: weakref.ref[Any] | None = None  # the last backward of which it has done so

    def backward(grads: Any) -> None:
        nonlocal last_entered
        if (live := reference()) is None:
            return
        under_way = live.start()
        if last_entered is None or last_entered() is not under_way:
            last_entered = weakref.ref(under_way)
            live.enter(index, generation, forward)

    return backward


def before_gradient(output: Tensor, hook: Callable[[Any], None]) -> RemovableHandle | None:
    """Have `hook` called before backward comes to where `output` was made.

    Hooks of the tensor itself would not do: a view that is changed in place is made anew, from its base.

    Returns: for a leaf, which outlives the forward, what takes the hook away again.
    """
    made_by = [tensor.grad_fn for tensor in (output, output._base) if tensor is not None]
    for node in made_by:
        if node is not None:
            node.register_prehook(hook)  # type: ignore[no-untyped-call, unused-ignore]
    if made_by[0] is not None:
        return None
    handle: RemovableHandle = output.register_hook(hook)  # type: ignore[no-untyped-call, unused-ignore]
    return handle
