"""A tensor that has the shape, dtype and device of another, and not its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.parameters.gradient_hooks import register_before_own, register_unscaled
from terrazzo.engine.buckets.parameters.note import Note
from terrazzo.engine.runtime.overrides import HARMLESS, arguments, function_name
from terrazzo.engine.runtime.private_torch import as_class, plainly
from terrazzo.errors import Misuse

__all__ = ["Placeholder", "Zeros"]


class Placeholder(nn.Parameter):
    """Stand-in with the shape, dtype and device of a tensor, and without its values.

    Torch answers questions about these, `_answer` what else can be done, and for the rest `Misuse` is raised.
    """

    terrazzo_note: Note
    register_hook = register_unscaled
    register_post_accumulate_grad_hook = register_before_own

    @classmethod
    def blank(cls, like: Tensor, name: str, dtype: torch.dtype | None = None) -> Self:
        """Make one of the shape and device of `like`, and its dtype unless given, in the memory of one element."""
        with plainly():
            one = torch.zeros((), dtype=like.dtype if dtype is None else dtype, device=like.device)
            made: Self = as_class(cls, one.expand(like.shape), False)
        made.terrazzo_note = Note(name)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with plainly():
                return func(*args, **kwargs)
        touched = next((arg for arg in arguments(args, kwargs) if isinstance(arg, cls)), None)
        if touched is None:
            raise Misuse(
                f"{function_name(func)} was given a sharded tensor inside of a list in a list, which is not "
                "supported. Pass the tensor itself or one list, or call it inside 'with tz.gathered(model):'."
            )
        if (answer := touched._answer(func, args, kwargs)) is not NotImplemented:
            return answer
        raise Misuse(f"{function_name(func)} was called on {touched._refusal()}")

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what comes of a function that would touch the values; `NotImplemented` where it is refused.

        Args:
            args: this is the first placeholder of its class among them.
        """
        if func in (Tensor.__repr__, Tensor.__format__):
            return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype})"
        return NotImplemented

    def _refusal(self) -> str:
        """Say what this is, why it cannot be touched, and what to do instead."""
        raise NotImplementedError


class Zeros(Placeholder):
    """Result of `torch.zeros_like` of a parameter at rest: a gradient for a first step that is to change nothing.

    It has the memory of one element, since a full tensor of each parameter would be the whole model on each rank.
    """

    def _refusal(self) -> str:
        return (
            f"zeros_like({self.terrazzo_note.name!r}), which stands in for a full tensor on every rank, since that "
            "parameter is sharded. If you want one, write torch.zeros(p.shape, dtype=p.dtype, device=p.device)."
        )
