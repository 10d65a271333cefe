"""How the dims of functions go that are not torch's: said once, beside the function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from terrazzo.engine.runtime.overrides import parameter_names
from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import BadInput
from terrazzo.parallel.tensor.channels.cut_dim import ChannelCuts, ChannelRule, FunctionCall, Mixed
from terrazzo.parallel.tensor.channels.products import placed

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
        equation: a term for each tensor that it is given, in the order of its parameters, and behind `->` for each that
            it returns: names of the dims. A dim with a name is kept apart: a place there is computed of the same place
            in all arguments that have the name. `_` is a dim along which the function computes, and which ranks must
            have whole. `...` are any others in front, which it keeps apart. A function that writes to what it is given
            must return that.

    Returns:
        what to call in the place of the function; the operator itself for an operator.

    Raises:
        BadInput: for what is no function, or no such equation; when it is called, for tensors of other dims, or by
            names in an order that is not known.
    """
    if isinstance(function, nn.Module):
        raise BadInput(
            f"terrazzo.parallel.declare: {type(function).__name__} is a module, whose weights the model would not have "
            "any more: declare the function that its forward calls."
        )
    if not callable(function):
        raise BadInput(f"terrazzo.parallel.declare: {function!r} is no function.")
    rule = _rule_of(equation)
    if isinstance(function, OPERATORS):
        _RULES[getattr(function, "overloadpacket", function)] = rule
        return function

    @functools.wraps(function)
    def ask_modes(*args: Any, **kwargs: Any) -> Any:
        given = tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if has_torch_function(given):
            _check_order(function, kwargs)
            return handle_torch_function(ask_modes, given, *args, **kwargs)
        return function(*args, **kwargs)

    _RULES[ask_modes] = rule
    return ask_modes  # type: ignore[return-value]


def declared_rule(function: Any) -> ChannelRule | None:
    """What was declared of one of those that torch's modes see."""
    return _RULES.get(getattr(function, "overloadpacket", function))


def _check_order(function: Any, named: Any) -> None:
    """Check that tensors that are given by name have an order, in which their terms are."""
    known = parameter_names(function)
    unknown = [name for name, each in named.items() if name not in known and _has_tensors(each)]
    if unknown:
        raise BadInput(
            f"A function that was declared to terrazzo.parallel.declare is called with tensors by name "
            f"({', '.join(unknown)}), and does not say in which order it takes these: give them by position."
        )


def _has_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor) for each in tree_leaves(value))


# -- equations -------------------------------------------------------------------------------------------------

_COMPUTED = "_"
_OTHERS = "..."


def _rule_of(equation: str) -> ChannelRule:
    """The rule for a function whose dims have these names."""
    left, arrow, right = equation.partition("->") if isinstance(equation, str) else ("", "", "")
    terms, outs = ([each.split() for each in side.split(",")] for side in (left, right))
    if why := "it has no ->" if not arrow else _why_wrong(terms, outs):
        raise BadInput(
            f"terrazzo.parallel.declare: the equation is {equation!r}, and {why}; give names of dims of each tensor, "
            "as in 'b t h _, b s h _ -> b t h _', _ for dims that it computes along and ... for others in front."
        )

    def rule(call: FunctionCall) -> ChannelCuts:
        given, found = _named(equation, terms, call.tensors), []
        for result, out in zip(call.results, _named(equation, outs, call.results), strict=True):
            kept = ["" if name == _COMPUTED else name for name in out]  # `_` of an argument goes to no result
            found += placed(call, call.tensors, given, kept, result)
        _check_whole(call, given)
        return found

    return rule


def _why_wrong(terms: Sequence[Sequence[str]], outs: Sequence[Sequence[str]]) -> str:
    """What is wrong with an equation's terms; empty: nothing."""
    known = {_COMPUTED, *(name for term in terms for name in term)}
    for term in (*terms, *outs):
        if wrong := [name for name in term if not name.isidentifier() and name != _OTHERS]:
            return f"{wrong[0]!r} is no name"
        if _OTHERS in term[1:]:
            return "... is not in front"
        if twice := [name for name in term if name != _COMPUTED and term.count(name) > 1]:
            return f"{twice[0]!r} is twice in a term"
    if new := [name for out in outs for name in out if name not in known]:
        return f"no argument has the dim {new[0]!r} of a result"
    if not all(outs):
        return "a result has no dims (a function must return what it writes to, if it does nothing else)"
    return ""


def _named(equation: str, terms: Sequence[Sequence[str]], tensors: Sequence[Tensor]) -> list[list[str]]:
    """The names of each tensor's dims."""
    named = []
    for term, tensor in zip(terms, tensors, strict=False):
        others = tensor.dim() - len(term) + 1 if _OTHERS in term else 0
        named.append(
            [f"{_OTHERS}{number}" for number in range(others, 0, -1)] + [name for name in term if name != _OTHERS]
        )
    if len(terms) != len(tensors) or any(
        len(each) != tensor.dim() for each, tensor in zip(named, tensors, strict=True)
    ):
        raise BadInput(
            f"A function was declared as {equation!r}, and is called with, or returns, tensors of other dims: "
            f"{', '.join(str(tuple(each.shape)) for each in tensors)}. Give terms for all of them, in their order."
        )
    return named


def _check_whole(call: FunctionCall, named: Sequence[Sequence[str]]) -> None:
    """Check that no tensor has all of a dim of which another has this rank's part: numbers of the two do not match."""
    cuts = [(dims[cut.dim], cut) for each, dims in zip(call.tensors, named, strict=True) if (cut := call.cut_of(each))]
    for each, dims in zip(call.tensors, named, strict=True):
        for name, cut in cuts if call.cut_of(each) is None else ():
            if name in dims and each.shape[dims.index(name)] > 1:
                raise Mixed(cut, f"takes this rank's {name!r} with all that another tensor has")
