"""Text generation by a model whose weights are split: ranks run their forwards together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakMethod

from torch import nn

from terrazzo.engine import engine_of, register_forward_method

__all__ = ["generate_together"]


def generate_together(model: nn.Module) -> None:
    """Let all ranks run as many forwards as the longest in `generate` of transformers, where each gathers weights.

    It does so by itself for FSDP and DeepSpeed only, and ranks stop where their own texts end.

    Args:
        model: sharded; of any kind, perhaps with PEFT around it.
    """
    engine = engine_of(model)
    within: Any = getattr(model, "get_base_model", None)  # of PEFT
    base: Any = model if within is None else within()
    own = getattr(type(base), "generate", None)
    if not engine.plan.weight.axes or own is None or "synced_gpus" not in inspect.signature(own).parameters:
        return
    bound = base.generate  # perhaps not the class's: a partial of it, say
    inner: Callable[[], Any] = WeakMethod(bound) if inspect.ismethod(bound) else lambda: bound
    place = _place(bound)

    @wraps(own)
    def generate(inner: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        called = inner()
        if place is not None and len(args) > place:
            return called(*args[:place], True, *args[place + 1 :], **kwargs)
        return called(*args, **{**kwargs, "synced_gpus": True})

    base.generate = MethodType(generate, inner)  # Fabric marks methods only; one of the model would keep it alive
    if base is not model:  # PEFT's own goes past the model's forward, which gathers what is in no unit
        register_forward_method(model, "generate")


def _place(function: Callable[..., Any]) -> int | None:
    """Where `synced_gpus` stands among the arguments, if it may be given without its name."""
    named = inspect.signature(function).parameters
    if "synced_gpus" not in named or named["synced_gpus"].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return list(named).index("synced_gpus")
