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

from terrazzo.engine.runtime.private_torch import found

__all__ = ["calling_module", "is_inside_own_step", "runs_inside_itself"]


def runs_inside_itself(model: nn.Module) -> bool:
    """Whether two calls of `model` are under way on this thread, one in the other; asked in the inner one."""
    return _runs_twice(_CALL, lambda held: held["self"] is model)


def is_inside_own_step(optimizer: Optimizer) -> bool:
    """Whether the step is one that the optimizer's own step calls of its base class; to be asked by a step's hook.

    Both have hooks once a plain optimizer of the base class has been built in this process.
    """
    return _runs_twice(_STEP, lambda held: held["args"][0] is optimizer)


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


def _runs_twice(code: CodeType, is_it: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether two calls of one function are under way on this thread whose local variables are so."""
    calls = (frame for frame in _outwards(sys._getframe(2)) if frame.f_code is code and is_it(frame.f_locals))
    return len(list(islice(calls, 2))) == 2


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code_of(function: Any, local: str) -> CodeType:
    """The code of one of torch's functions, which has a local variable of that name.

    Raises:
        ImportError: where it has none.
    """
    code: CodeType = function.__code__
    if local not in code.co_varnames:
        raise ImportError(
            f"Terrazzo's engine looks for {local!r} in {code.co_qualname}, which is not there in torch "
            f"{torch.__version__}. It is there from torch 2.11 to 2.13: install one of these."
        )
    return code


_CALL = _code_of(found(nn.Module, "_call_impl"), "self")
"""What runs a module's forward."""
_STEP = _code_of(found(Optimizer, "profile_hook_step")(lambda: None), "args")
"""What runs an optimizer's step, and the hooks around it."""
