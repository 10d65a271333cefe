"""The loss scale on its way into a pass and out of it: what is done to inputs, outputs and gradients of a model.

The model's outputs, and what its modules put aside, are handed over in fp32; on their way back, gradients are
multiplied by the scale before anything is rounded to fp16. Those of inputs leave the model without it. Nothing is
scaled outside of the model, and a gradient that would come to a weight without the scale is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.autograd.asides import map_asides
from terrazzo.engine.autograd.outputs import PLAIN, leaves_of, map_tensors
from terrazzo.engine.progress.loss_scale import LossScale
from terrazzo.errors import Misuse

__all__ = ["Passes", "ScaledPasses"]


class Passes:
    """What the hooks of a model tell its loss scale of each pass, and get of it; here nothing is scaled."""

    def begin_forward(self, model: nn.Module) -> None:
        """The model's own forward begins, perhaps after a backward that raised."""

    def check_unit(self, title: str) -> None:
        """A unit runs outside of the model's forward, and is differentiated.

        Raises:
            Misuse: where its gradients would lack the scale.
        """

    def of_inputs(self, inputs: Any) -> Any:
        """What the model gets of its inputs: gradients of those that are differentiated leave it unscaled.

        Raises:
            Misuse: for an object that cannot be opened and has a tensor that is differentiated.
        """
        return inputs

    def of_output(self, output: Any) -> Any:
        """What the user gets of what the model's forward has returned, or of what is run again in backward.

        Raises:
            Misuse: for an object that cannot be opened and has a tensor with a gradient, which would lack the scale.
        """
        return output

    def end_forward(self, model: nn.Module) -> None:
        """The model's own forward has returned, or raised."""

    def note_scaled(self) -> None:
        """Gradients of the backward now under way have been multiplied, here or on another stage."""

    def check_gradient(self, name: str) -> None:
        """A gradient has come for the parameter `name`.

        Raises:
            Misuse: where it lacks the scale.
        """

    def end_backward(self) -> None:
        """Every gradient of a backward has come."""


class ScaledPasses(Passes):
    """Passes whose gradients are multiplied by a loss scale.

    Attributes:
        loss_scale: as it is when the backward comes: the scale of a step changes behind it.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self._are_scaled = False  # gradients of the backward now under way

    def begin_forward(self, model: nn.Module) -> None:
        """Modules find what they have put aside as they left it: in a forward its gradient comes from the outputs."""
        self._are_scaled = False
        map_asides(model, _unscaled)

    def check_unit(self, title: str) -> None:
        raise Misuse(
            f"{title} was called outside of the model's forward, whose outputs alone get the loss scale of fp16: its "
            "gradients would be too small by that. Call it in a method and name that by "
            "tz.register_forward_method, call it under torch.no_grad(), or train in bf16."
        )

    def of_inputs(self, inputs: Any) -> Any:
        def unscaled(tensor: Tensor) -> Tensor:
            return _UnscaleBackward.apply(tensor, self) if _leaves_model(tensor) else tensor  # type: ignore[no-untyped-call]

        leaves = leaves_of(inputs)
        for leaf in leaves:
            _check_input(leaf)
        return map_tensors(unscaled, inputs) if any(map(_leaves_model, leaves)) else inputs

    def of_output(self, output: Any) -> Any:
        """`output` with its tensors in fp32, whose gradients are multiplied by the scale on their way in."""

        def scaled(tensor: Tensor) -> Tensor:
            return self._scaled(tensor) if tensor.is_floating_point() else tensor

        return map_tensors(scaled, output, _check_output)

    def end_forward(self, model: nn.Module) -> None:
        """Scale what modules have put aside in attributes, or in lists and dicts there, as an output is."""

        def scaled(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or _unscaled(tensor) is not tensor:
                return tensor
            made = self._scaled(tensor)
            made.grad_fn.unscaled = tensor  # type: ignore[union-attr]
            return made

        with torch.inference_mode(False), torch.enable_grad():
            map_asides(model, scaled)

    def note_scaled(self) -> None:
        self._are_scaled = True

    def check_gradient(self, name: str) -> None:
        if not self._are_scaled:
            raise Misuse(
                f"A gradient reached {name!r} without passing through the model's output, so the loss scale of fp16 "
                "is missing from it. Return every tensor that a loss is computed from out of the model's forward, in "
                "tuples, lists or dicts."
            )

    def end_backward(self) -> None:
        self._are_scaled = False

    def _scaled(self, output: Tensor) -> Tensor:
        """`output` in fp32, whose gradient is multiplied by the scale on its way in."""
        scaled: Tensor = _ScaleBackward.apply(output, self)  # type: ignore[no-untyped-call]
        return scaled


def _leaves_model(leaf: Any) -> bool:
    """Whether an input is a tensor whose gradient leaves the model."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()


def _check_input(leaf: Any) -> None:
    if (name := _differentiated_in(leaf)) is not None:
        raise Misuse(
            f"The model was given a {type(leaf).__name__}, and the gradient of its {name!r} would have the loss scale "
            "of fp16. Give tensors whose gradients are wanted in tuples, lists, dicts or dataclasses."
        )


def _check_output(leaf: Any) -> None:
    if (name := _differentiated_in(leaf)) is not None:
        raise Misuse(
            f"The model returned a {type(leaf).__name__}, and the loss scale of fp16 is missing from gradients of its "
            f"{name!r}. Return every tensor that a loss is computed from out of the model's forward, in tuples, lists, "
            "dicts or dataclasses."
        )


def _differentiated_in(leaf: Any) -> Any:
    """Name of a tensor that needs gradients in an object which cannot be opened; None without one."""
    if isinstance(leaf, PLAIN):
        return None
    slots = [vars(kind).get("__slots__", ()) for kind in type(leaf).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    entries = {name: getattr(leaf, name, None) for name in names} | getattr(leaf, "__dict__", {})
    if isinstance(leaf, Mapping | list | tuple | Set):
        entries |= leaf if isinstance(leaf, Mapping) else dict(enumerate(leaf))
    named = (name for name, value in entries.items() if isinstance(value, Tensor) and value.requires_grad)
    return next(named, None)


def _unscaled(tensor: Tensor) -> Tensor:
    """The tensor that this one was before its forward ended, unless it has been replaced or changed in place."""
    unscaled: Tensor = getattr(tensor.grad_fn, "unscaled", tensor)
    return unscaled


class _ScaleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, passes: ScaledPasses) -> Tensor:
        ctx.passes, ctx.dtype = passes, output.dtype
        return output.to(torch.float32, copy=True)  # never the input itself: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.passes.note_scaled()
        return (grads[0] * ctx.passes.loss_scale.scale).to(ctx.dtype), None


class _UnscaleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passes: ScaledPasses) -> Tensor:
        ctx.passes, ctx.dtype = passes, tensor.dtype
        return tensor.to(torch.float32, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] / ctx.passes.loss_scale.scale).to(ctx.dtype), None
