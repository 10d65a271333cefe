"""Gradients of linear layers' weights, computed later than the gradients of their inputs.

Earlier stages wait for gradients of inputs alone, so a rank computes those of weights while it would wait (Qi et al.,
arXiv 2401.10241). Gradients of all other parameters, such as biases, are computed in backward as usual.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.engine.buckets.parameters.gradient_hooks import has_hooks, is_accumulated
from terrazzo.engine.pipeline.staged_step import DeferredGradient, StagedStep
from terrazzo.nn.float8_linear import Float8Linear, product_of
from terrazzo.nn.float8_products import Float8

__all__ = ["DeferredWeights"]


_DEFERRABLE = (nn.Linear.forward, Float8Linear.forward)
"""Forwards of which the gradient of the weight is one product."""


class _Product(NamedTuple):
    """The factors of the gradient of a weight, `[outputs, inputs]`.

    Attributes:
        gradient: that they are a part of.
        inputs: the layer's inputs, `[..., inputs]`.
        grad: the gradient of its outputs, `[..., outputs]`.
        float8: the products of a layer in 8 bits; None where the factors are multiplied as they are.
    """

    gradient: DeferredGradient
    inputs: Tensor
    grad: Tensor
    float8: Float8 | None


class DeferredWeights:
    """The deferred gradients of one step, by stage and micro-batch.

    Linear layers defer them, in 8 bits too, unless their forward has been replaced or their weight has hooks.

    Attributes:
        turn: the stage and the micro-batch that run now.
    """

    def __init__(self, step: StagedStep) -> None:
        self._gradients = step.deferrable()
        self._waiting: defaultdict[tuple[int, int], list[_Product]] = defaultdict(list)
        self.turn = (0, 0)

    @contextlib.contextmanager
    def by(self, model: nn.Module) -> Iterator[None]:
        """Inside of it the linear layers of a model defer the gradients of their weights."""
        put: list[nn.Linear] = []
        for module in (each for each in model.modules() if self._defers(each)):
            module.forward = functools.partial(self._forward, module)  # type: ignore[method-assign]
            put.append(module)
        try:
            yield
        finally:
            for module in put:
                del module.forward

    def _defers(self, module: nn.Module) -> TypeGuard[nn.Linear]:
        """Not where something has replaced its forward, or is to see the weight's gradient in a backward."""
        if not isinstance(module, nn.Linear) or type(module).forward not in _DEFERRABLE:
            return False
        weight = module._parameters.get("weight")
        if weight is None or weight not in self._gradients:
            return False
        return "forward" not in vars(module) and not has_hooks(weight)

    def _forward(self, module: nn.Linear, input: Tensor) -> Tensor:
        kind, weight, bias = input.device.type, module.weight, module.bias
        if not torch.is_grad_enabled():  # checkpointing will run it again
            return product_of(module)(input, weight, bias)
        if isinstance(float8 := product_of(module), Float8):
            return float8(input, weight, bias, defer=functools.partial(self.add, weight, float8=float8))
        if not torch.is_autocast_enabled(kind):
            return self._apply(input, weight, bias, weight.dtype)
        dtype = torch.get_autocast_dtype(kind)
        inner = dtype if weight.dtype != torch.float64 else weight.dtype  # which autocast leaves alone
        with torch.autocast(kind, enabled=False):
            return self._apply(input.to(inner), weight, None if bias is None else bias.to(inner), inner)

    def _apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        output: Tensor = _Linear.apply(input, weight, bias, dtype, self)  # type: ignore[no-untyped-call]
        return output

    def add(self, weight: Tensor, inputs: Tensor, grad: Tensor, float8: Float8 | None = None) -> bool:
        """Defer the gradient of `weight`, whose memory is allocated now. Returns whether it is deferred.

        It is not where `torch.autograd.grad` runs, in a forward or a loss: that adds to no weight's gradient.
        """
        if not is_accumulated(weight):
            return False
        gradient = self._gradients[weight]
        gradient.expect()
        self._waiting[self.turn].append(_Product(gradient, inputs, grad, float8))
        return True

    @torch.no_grad()
    def compute(self, stage: int, micro_batch: int) -> None:
        """Compute the gradients that the backward of a micro-batch has deferred, in the order of that backward."""
        for gradient, inputs, grad, float8 in self._waiting.pop((stage, micro_batch), ()):
            with torch.autocast(grad.device.type, enabled=False):
                rows, grads = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
                product = grads.t() @ rows if float8 is None else float8.of_weight(rows, grads)
            gradient.add(product.to(gradient.dtype))


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward puts off the gradient of the weight.

    Args:
        dtype: that it computes in, of inputs and bias; under `torch.autocast` the weight has another.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, deferred: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.deferred, ctx.weight = deferred, weight
        return F.linear(inputs, weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        rows, of_weight = grad.reshape(-1, grad.shape[-1]), None
        with torch.autocast(grad.device.type, enabled=False):
            to_inputs = rows.mm(weight.to(rows.dtype)).view(inputs.shape) if ctx.needs_input_grad[0] else None
            if ctx.needs_input_grad[1] and not ctx.deferred.add(ctx.weight, inputs, grad):
                of_weight = (rows.t() @ inputs.reshape(-1, inputs.shape[-1])).to(weight.dtype)
        return to_inputs, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None
