"""The functions that torch calls: each reaches the `Hooks` of its model through a weak reference.

Those of modules stay out of compiled graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.bucket import Bucket

__all__ = [
    "after_model",
    "after_unit",
    "before_gradient",
    "before_model",
    "before_unit",
    "end_of_backward",
    "model_ended",
    "on_backward",
    "on_gradient",
    "on_use",
    "take_last",
]

HooksRef = weakref.ref[Any]
"""To a `Hooks`."""


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call, unused-ignore]
    return disabled


def before_model(hooks: HooksRef) -> Callable[..., Any]:
    """A pre-hook of the model, with keywords."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        live = hooks()
        return live.before_model(args, kwargs) if live is not None else (args, kwargs)

    return _eager(before)


def after_model(hooks: HooksRef) -> Callable[..., Any]:
    """A hook of the model, which may change what it returns."""

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        live = hooks()
        return live.after_model(output) if live is not None else output

    return _eager(after)


def model_ended(hooks: HooksRef) -> Callable[..., None]:
    """A hook of the model that is called when it raises, too."""

    def ended(module: nn.Module, args: Any, output: Any) -> None:
        if (live := hooks()) is not None:
            live.model_ended()

    return _eager(ended)


def on_use(hooks: HooksRef) -> Callable[[int], None]:
    """Told of a unit, by index, whose weights a part of backward is about to read."""

    def use(unit: int) -> None:
        if (live := hooks()) is not None:
            live.use_saved(live.units[unit])

    return use


def before_unit(hooks: HooksRef, index: int) -> Callable[..., None]:
    """A pre-hook of a unit's module."""

    def before(module: nn.Module, args: Any) -> None:
        if (live := hooks()) is not None:
            live.before_unit(live.units[index], args)

    return _eager(before)


def after_unit(hooks: HooksRef, index: int) -> Callable[..., None]:
    """A hook of a unit's module."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if (live := hooks()) is not None:
            live.after_unit(live.units[index], output)

    return _eager(after)


def on_gradient(hooks: HooksRef, unit: int, bucket: weakref.ref[Bucket], index: int) -> Callable[[Tensor], None]:
    """A hook of a parameter, after its gradient has been accumulated."""

    def gradient(parameter: Tensor) -> None:
        live, owner = hooks(), bucket()
        if live is not None and owner is not None:
            live.take_gradient(live.units[unit], owner, index)

    return gradient


def on_backward(hooks: HooksRef, index: int, generation: int) -> Callable[[Any], None]:
    """Tells once per backward pass that it has reached one call of a unit, whichever of its outputs comes first."""
    told = 0

    def backward(grads: Any) -> None:
        nonlocal told
        live = hooks()
        if live is not None and told != live.start_backward():
            told = live.start_backward()
            live.before_backward(live.units[index], generation)

    return backward


def end_of_backward(hooks: HooksRef) -> Callable[[], None]:
    """A callback at the end of a backward pass."""

    def end() -> None:
        if (live := hooks()) is not None:
            live.end_backward()

    return end


def before_gradient(output: Tensor, hook: Callable[[Any], None]) -> None:
    """Have `hook` called before backward comes to where `output` was made.

    Hooks of the tensor itself would not do: a view that is changed in place is made anew, from its base.
    """
    made_by = [tensor.grad_fn for tensor in (output, output._base) if tensor is not None]
    for node in made_by:
        if node is not None:
            node.register_prehook(hook)  # type: ignore[no-untyped-call, unused-ignore]
    if made_by[0] is None:
        output.register_hook(hook)  # type: ignore[no-untyped-call, unused-ignore]


def take_last(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that stays behind those that are registered later: it takes the gradient away."""
    register: Any = Tensor.register_post_accumulate_grad_hook
    ours = weakref.ref(parameter)
    handle = register(parameter, hook)

    def before_it(theirs: Callable[[Tensor], None]) -> Any:
        owner: Any = ours()
        registered = register(owner, theirs)
        with torch._C.DisableTorchFunctionSubclass():
            hooks = owner._post_accumulate_grad_hooks
            hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the order of entering
        return registered

    parameter.register_post_accumulate_grad_hook = before_it  # type: ignore[method-assign]
