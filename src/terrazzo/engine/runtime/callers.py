"""Who has called what runs now, as Python's stack tells: where calls may raise, no count of them would stay right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType

from torch import nn
from torch.optim import Optimizer

__all__ = ["calling_module", "is_inside_own_step", "runs_inside_itself"]


def runs_inside_itself(model: nn.Module) -> bool:
    """Whether two calls of `model` are under way on this thread, one in the other; asked in the inner one."""
    calls = (
        frame
        for frame in _outwards(sys._getframe(1))
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
    )
    return len(list(islice(calls, 2))) == 2


def is_inside_own_step(optimizer: Optimizer) -> bool:
    """Whether the step is one that the optimizer's own step calls of its base class; to be asked by a step's hook.

    Both have hooks once a plain optimizer of the base class has been built in this process.
    """
    hooked = sys._getframe(2)  # torch's function around a step
    return any(
        frame.f_code is hooked.f_code and frame.f_locals["args"][0] is optimizer for frame in _outwards(hooked.f_back)
    )


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


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
