"""How the dims of functions go that are not torch's: said once, beside the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput
from terrazzo.parallel.tensor.channels.cut_dim import ChannelRule
from terrazzo.parallel.tensor.channels.products import rule_of_equation

__all__ = ["OPERATORS", "declare", "declared_rule"]

F = TypeVar("F", bound=Callable[..., Any])

OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
"""The classes of operators: by name, and with the types of what they are given."""
_RULES: dict[Any, ChannelRule] = {}
"""By function, or by operator: they are few, and live as long as the program."""


def declare(function: F, equation: str) -> F:
    """Say which dims a function keeps apart, such as a kernel of Triton, of C++ or of another library.

    Between a `colwise` and a `rowwise` each rank has a part of the channels, or of the heads, and first forwards are
    watched for functions that would take it for all. One that is not torch's is refused, or cannot be followed, unless
    it is declared. So is one that is compiled::

        rotate = tz.parallel.declare(rotate_kernel, "b t h _, t _, t _ -> b t h _")
        norm = tz.parallel.declare(rms_norm_kernel, "... _, _ -> ... _")
        gate = tz.parallel.declare(torch.compile(swiglu), "..., ... -> ...")

    It is taken at its word; `tz.parallel.check` compares numbers.

    Args:
        function: a function, or an operator of `torch.ops`.
        equation: a term for each tensor that it is given, in their order, and behind `->` for each that it returns:
            names of the dims. A dim with a name is kept apart: a place there is computed of the same place in all
            arguments that have the name. `_` is a dim along which the function computes, and which ranks must have
            whole. `...` are any others in front, which it keeps apart.

    Returns:
        what to call in the place of the function; the operator itself for an operator.

    Raises:
        BadInput: for what is no function, or no such equation; when it is called, for tensors of other dims.
    """
    if not callable(function):
        raise BadInput(f"terrazzo.parallel.declare: {function!r} is no function.")
    rule = rule_of_equation(equation)
    if isinstance(function, OPERATORS):
        _RULES[getattr(function, "overloadpacket", function)] = rule
        return function

    @functools.wraps(function)
    def ask_modes(*args: Any, **kwargs: Any) -> Any:
        given = tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if has_torch_function(given):
            return handle_torch_function(ask_modes, given, *args, **kwargs)
        return function(*args, **kwargs)

    _RULES[ask_modes] = rule
    return ask_modes  # type: ignore[return-value]


def declared_rule(function: Any) -> ChannelRule | None:
    """What was declared of one of those that torch's modes see."""
    return _RULES.get(getattr(function, "overloadpacket", function))
