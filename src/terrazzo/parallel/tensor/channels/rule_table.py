"""The one table of rules: what any of torch's functions makes of the dim that ranks have in parts.

Behind a `colwise` the whole tensor would be the ranks' tensors side by side along one dim: its last, or heads behind a
view. A function is right there if what it makes of the whole tensor is what ranks make of their parts, side by side
again. One without a row here must compute element by element, as its operators say (`elementwise`), or is refused.

Rows are of functions, and not of the operators that these consist of: an operator knows the sizes of a view, but not
where -1 was given. A method, a function and an operator of one name are one row.
"""

from __future__ import annotations

from typing import Any

from terrazzo.engine.runtime.overrides import function_name
from terrazzo.parallel.tensor.channels.along_dims import ALONG, Along
from terrazzo.parallel.tensor.channels.cut_dim import ChannelRule, FunctionCall
from terrazzo.parallel.tensor.channels.declared import OPERATORS, declared_rule
from terrazzo.parallel.tensor.channels.moved_dims import MOVES
from terrazzo.parallel.tensor.channels.places import PLACES
from terrazzo.parallel.tensor.channels.products import PRODUCTS

__all__ = ["RULES", "name_of", "rule_of"]

RULES: dict[str, ChannelRule] = {**ALONG, **MOVES, **PLACES, **PRODUCTS}


def rule_of(func: Any, call: FunctionCall) -> ChannelRule | None:
    """The rule for a call that has no result yet: as declared of the function, or of the table; None: there is none."""
    rule = declared_rule(func) or RULES.get(call.name)
    return None if isinstance(rule, Along) and rule.dims(call) is None else rule


def name_of(func: Any) -> str:
    """The name in the table: the plain one of methods in place, of operators of torch and of its submodules.

    What is not torch's has the name of its library in front.
    """
    if isinstance(func, OPERATORS):
        library, name = str(func).split(".")[:2]
        return name.strip("_") if library in ("aten", "prims") else f"{library}::{name.strip('_')}"
    name = function_name(func).strip("_")
    library = (getattr(func, "__module__", None) or "torch").partition(".")[0]
    if library != "torch":
        return f"{library}::{name}"
    return name.removeprefix("fft_").removeprefix("linalg_").removeprefix("special_")
