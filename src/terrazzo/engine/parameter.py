"""What a parameter looks like while its values are split over ranks.

Its class becomes `AtRest`: questions about shape, dtype, device or flags are answered as always, and anything that
would touch the values raises `Misuse` with the parameter's name. The object stays the same one throughout, so ties,
hooks and the user's own references stay valid; only its class and its memory come and go.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from terrazzo.errors import Misuse

__all__ = ["Arriving", "Asked", "AtRest", "Guard", "Zeros", "sharded_name", "torch_names", "watch_data"]

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


_HARMLESS = _harmless()


class AtRest(nn.Parameter):
    """A parameter whose values are not on this rank now."""

    terrazzo_name: str
    terrazzo_split: bool = True

    @classmethod
    def blank(cls, like: Tensor, name: str, dtype: torch.dtype | None = None) -> Self:
        """One of the shape and device of `like`, and its dtype unless given, in the memory of one element."""
        with torch._C.DisableTorchFunctionSubclass():
            one = torch.zeros((), dtype=like.dtype if dtype is None else dtype, device=like.device)
            made: Self = torch.Tensor._make_subclass(cls, one.expand(like.shape), False)
        made.terrazzo_name = name
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        touched = next((arg for arg in _flatten(args, kwargs) if isinstance(arg, cls)), None)
        if func in (_T.__repr__, _T.__format__) and touched is not None:
            return f"Parameter(sharded, shape={tuple(touched.shape)}, dtype={touched.dtype})"
        reach = vars(touched).get("terrazzo_reach") if touched is not None else None
        if reach is not None and reach():  # inside the model's forward: it has been gathered
            return func(*args, **(kwargs or {}))
        measure = vars(touched).get("terrazzo_measure") if touched is not None and touched.terrazzo_split else None
        if measure is not None and (measured := measure(func, args, kwargs or {})) is not None:
            return measured
        if func is torch.zeros_like and type(touched) is AtRest:
            return Zeros.blank(touched, touched.terrazzo_name)
        raise Misuse(f"{_function_name(func)} was called on {cls._refusal(touched)}")

    @classmethod
    def _refusal(cls, touched: AtRest | None) -> str:
        """What was touched, why that cannot be, and what to do."""
        name = touched.terrazzo_name if touched is not None else "a parameter"
        if touched is not None and not touched.terrazzo_split:
            return (
                f"{name!r}, which is being updated in the background until its unit's next forward. Read or write it "
                "inside 'with tz.gathered(model):', or use tz.Offload(step='synchronous')."
            )
        return (
            f"{name!r}, whose values are sharded over ranks: outside its unit's forward and backward they are not on "
            "this rank. Read or write them inside 'with tz.gathered(model):', or call the model itself; a method of "
            "its own that computes with weights needs tz.register_forward_method(model, 'name') once."
        )


class Zeros(AtRest):
    """What `torch.zeros_like` makes of a parameter at rest: a gradient for a first step that is to change nothing.

    It has the memory of one element, since a full tensor of each parameter would be the whole model on each rank.
    """

    @classmethod
    def _refusal(cls, touched: AtRest | None) -> str:
        assert touched is not None, "torch calls this for an argument of the class"
        return (
            f"zeros_like({touched.terrazzo_name!r}), which stands in for a full tensor on every rank, since that "
            "parameter is sharded. If you want one, write torch.zeros(p.shape, dtype=p.dtype, device=p.device)."
        )


class Arriving(AtRest):
    """A parameter whose new values are on their way, beside the computation: whatever touches it waits for them."""

    terrazzo_arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _HARMLESS:
            for parameter in [arg for arg in _flatten(args, kwargs) if isinstance(arg, cls)]:
                parameter.terrazzo_arrive()  # it is of its own class again
            if func is _T.data.__get__:  # type: ignore[attr-defined]
                return args[0].data  # which may be watched
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _function_name(func: Callable[..., Any]) -> str:
    """What the user has written: a method's name, or that of a property that was asked or set."""
    of_property = getattr(getattr(func, "__self__", None), "__name__", None)
    return str(of_property or getattr(func, "__name__", func))


def _flatten(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    flat: list[Any] = []
    for arg in [*args, *(kwargs or {}).values()]:
        flat += arg if isinstance(arg, list | tuple) else [arg]
    return flat


def sharded_name(parameter: Tensor) -> str | None:
    """What a trainable parameter of a sharded model is called; None for any other tensor."""
    name: str | None = vars(parameter).get("terrazzo_name") if parameter.requires_grad else None
    return name


class Guard:
    """Lets the parameters of a bucket be read, or not; all at once, because it happens for every unit twice a pass.

    Args:
        parameters: with the names that errors call them.
        split: whether their values are split over ranks; else they are only out of reach while they are updated.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, str]], split: bool = True) -> None:
        self._classes = [(parameter, type(parameter)) for parameter, _ in parameters]
        for parameter, name in parameters:
            parameter.terrazzo_name, parameter.terrazzo_split = name, split  # type: ignore[attr-defined]

    def close(self, arrive: Callable[[], None] | None = None) -> None:
        """From now on, reading a value raises an error with the parameter's name; or calls `arrive`, which opens."""
        for parameter, _ in self._classes:
            parameter.__class__ = AtRest if arrive is None else Arriving
            parameter.terrazzo_arrive = arrive  # type: ignore[attr-defined]

    def open(self) -> None:
        """The parameters are ordinary ones again, of the classes they had."""
        for parameter, original in self._classes:
            parameter.__class__ = original


Asked: TypeAlias = dict[str, weakref.WeakValueDictionary[int, Tensor]]
"""What was given out as `.data`, by name of the parameter and `id`, as long as somebody holds it."""


def watch_data(parameter: nn.Parameter, asked: Asked) -> None:
    """Have what is asked of `parameter` as `.data` put into `asked`: what is written into it leaves no trace."""
    parameter.terrazzo_asked = asked  # type: ignore[attr-defined]
    parameter.__class__ = _watched(type(parameter))


_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor")
"""Modules that look at `.data` to see what a parameter is, and write nothing."""


@functools.cache
def _watched(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    descriptor: Any = vars(torch._C.TensorBase)["data"]

    def data(self: nn.Parameter) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self.detach()  # the same to a graph, which cannot hold what follows; writing into it leaves a trace
        known = vars(self)
        frame = sys._getframe(1)
        if frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back  # whoever touched it while it was arriving
        asks = frame.f_globals.get("__name__", "")
        value: Tensor = descriptor.__get__(self)
        if "terrazzo_asked" in known and not asks.startswith(_COMPILERS):
            held = known["terrazzo_asked"].setdefault(known["terrazzo_name"], weakref.WeakValueDictionary())
            held[id(value)] = value
        return value

    def give_data(self: nn.Parameter, value: Tensor) -> None:
        descriptor.__set__(self, value)

    return type(kind.__name__, (kind,), {"data": property(data, give_data), "__module__": kind.__module__})


def torch_names(named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have NumPy's names, which torch takes as well, by torch's own."""
    return {{"axis": "dim", "keepdims": "keepdim"}.get(name, name): value for name, value in named.items()}
