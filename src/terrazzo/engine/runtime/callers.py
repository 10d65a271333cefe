"""Who has called what runs now, as Python's stack tells: where calls may raise, no count of them would stay right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from terrazzo.engine.runtime.private_torch import lookup

__all__ = ["calling_module", "calls_of", "is_inside_own_step"]


def calls_of(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """What stands for each call of `model` that is under way on this thread, innermost first.

    It is the function in which torch runs that call's hooks and forward, and ends with the call. Ask at once, and keep
    no name for what is returned: it holds the frames of its callers, and so what these hold.
    """
    outwards = _outwards(sys._getframe(1))
    return (local["inner"] for local in _locals_of(_CALL, outwards) if local["self"] is model)


def is_inside_own_step(optimizer: Optimizer) -> bool:
    """Whether the step is one that the optimizer's own step calls of its base class; to be asked by a step's hook.

    Both have hooks once a plain optimizer of the base class has been built in this process.
    """
    steps = (local for local in _locals_of(_STEP, _outwards(sys._getframe(1))) if local["args"][0] is optimizer)
    return len(list(islice(steps, 2))) == 2


def calling_module(beyond: str) -> str:
    """The name of the module that has called the function which asks.

    Args:
        beyond: a module to look past, if the call came through one function of it.

    Returns:
        The empty string for code outside of modules.
    """
    caller = sys._getframe(2)
    if caller.f_back is not None and caller.f_globals.get("__name__") == beyond:
        caller = caller.f_back
    return str(caller.f_globals.get("__name__", ""))


def _locals_of(code: CodeType, frames: Iterator[FrameType]) -> Iterator[Mapping[str, Any]]:
    """The local variables of those calls that run one function."""
    return (frame.f_locals for frame in frames if frame.f_code is code)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code_of(function: Any, *names: str) -> CodeType:
    """The code of one of torch's functions, which has local variables of these names.

    Raises:
        ImportError: where it lacks one.
    """
    code: CodeType = function.__code__
    for name in names:
        if name not in code.co_varnames:
            raise ImportError(
                f"Terrazzo's engine looks for {name!r} in {code.co_qualname}, which is not there in torch "
                f"{torch.__version__}. It is there from torch 2.11 to 2.13: install one of these."
            )
    return code


_CALL = _code_of(lookup(nn.Module, "_call_impl"), "self", "inner")
"""What runs a module's forward."""
_STEP = _code_of(lookup(Optimizer, "profile_hook_step")(lambda: None), "args")
"""What runs an optimizer's step, and the hooks around it."""
