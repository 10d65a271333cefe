"""Calls of torch that come to a class of tensors instead, by `__torch_function__`: what they are, and are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import get_testing_overrides

__all__ = [
    "HARMLESS",
    "arguments",
    "arguments_text",
    "asks_size",
    "by_torch_names",
    "function_name",
    "in_order",
    "is_question",
    "parameter_names",
]

_T = Tensor
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "grad", "is_leaf", "grad_fn",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "retains_grad", "_backward_hooks",
    "_post_accumulate_grad_hooks", "output_nr", "_version", "grad_dtype",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "get_device", "requires_grad_", "storage_offset", "register_hook", "__len__",
    "register_post_accumulate_grad_hook",
)  # fmt: skip


def _harmless() -> frozenset[Any]:
    descriptors = [getattr(_T, name) for name in _PROPERTIES if hasattr(_T, name)]
    accesses = [getattr(d, access, None) for d in descriptors for access in ("__get__", "__set__", "__delete__")]
    return frozenset([*accesses, *(getattr(_T, name) for name in _METHODS)])


HARMLESS = _harmless()
"""What asks about a tensor, or notes something on it, and needs neither its values nor its memory."""
_MEMORY = frozenset([_T.data.__get__, _T.data.__set__, _T.data_ptr, _T.untyped_storage, _T.__repr__, _T.__format__])  # type: ignore[attr-defined]


def is_question(func: Any) -> bool:
    """Whether one of torch's functions asks about a tensor, or gives its memory, and computes nothing with it."""
    return func in HARMLESS or func in _MEMORY


_SIZES = frozenset(
    [*(getattr(_T, name).__get__ for name in ("shape", "nbytes")), _T.size, _T.numel, _T.nelement, _T.__len__]
)


def asks_size(func: Any) -> bool:
    """Whether one of torch's functions asks how large a tensor is."""
    return func in _SIZES


def function_name(func: Callable[..., Any]) -> str:
    """What the user has written: a method's name, or that of a property that was asked or set."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """What a function was given, and what is in lists and tuples there."""
    flat: list[Any] = []
    for arg in [*args, *(kwargs or {}).values()]:
        flat += arg if isinstance(arg, list | tuple) else [arg]
    return flat


def arguments_text(args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Arguments as ranks compare them and a user writes them.

    A number in a tensor is read, but for one in a device's memory, which the host would wait for.
    """
    return ", ".join([*map(_text_of, args), *(f"{name}={_text_of(each)}" for name, each in sorted(named.items()))])


def _text_of(argument: Any) -> str:
    if not isinstance(argument, Tensor):
        return repr(argument)
    return repr(argument.item()) if argument.numel() == 1 and argument.device.type == "cpu" else "tensor"


def by_torch_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have NumPy's names, which torch takes as well, by torch's own."""
    return {{"axis": "dim", "keepdims": "keepdim"}.get(name, name): value for name, value in named.items()}


def in_order(func: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name in the order in which the function has them: a user may write `input=` behind others."""
    names = parameter_names(func) if len(named) > 1 else []
    return dict(sorted(named.items(), key=lambda each: _place(each[0], names)))


def _place(name: str, names: Sequence[str]) -> int:
    if name == "input" and name not in names:
        return 0  # torch's own signatures have it as `self`, too
    return names.index(name) if name in names else len(names)


def parameter_names(func: Any) -> list[str]:
    """The names of a function's parameters, of an operator's, or of what torch lists for its own; empty: not known."""
    if hasattr(func, "overloads"):
        func = getattr(func, func.overloads()[0])
    if (schema := getattr(func, "_schema", None)) is not None:
        return [each.name for each in schema.arguments]
    listed: Any = get_testing_overrides().get(func)
    for each in (func, listed):
        try:
            parameters = inspect.signature(each).parameters.values()
        except (TypeError, ValueError):  # built in
            continue
        if names := [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]:
            return names
    return []
