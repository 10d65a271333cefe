"""Text generation by a model whose weights are split: ranks run their forwards together."""

from __future__ import annotations

import inspect
from functools import wraps
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
    inner = WeakMethod(base.generate)  # the model holds this function

    @wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        called = inner()
        assert called is not None
        return called(*args, **{**kwargs, "synced_gpus": True})

    base.generate = generate
    if base is not model:  # PEFT's own goes past the model's forward, which gathers what is in no unit
        register_forward_method(model, "generate")
