"""The three matrix products of a linear layer, one in forward and two in backward, of 8-bit floats.

`y = x Wᵀ`, `dx = dy W` and `dW = dyᵀ x` each multiply two matrices that have just been cast. For backward x and W are
kept as they are, as torch's own linear layer keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.nn.float8_matrices import E4M3, MULTIPLE, Recipe, cast, multiplied
from terrazzo.nn.single_backward import check_no_graph

__all__ = ["Float8"]

Defer = Callable[[Tensor, Tensor], bool]
"""Is given a layer's inputs and its outputs' gradient, and returns whether the weight's gradient is computed later."""


@dataclass(frozen=True)
class Float8:
    """The products of one linear layer.

    Attributes:
        recipe: how they are made.
        whole: where ranks have parts of the weight, the maximum of a value over them. Collective.
    """

    recipe: Recipe
    whole: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8:
        return self

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, defer: Defer | None = None) -> Tensor:
        """`F.linear`: `[..., inputs]` and `[outputs, inputs]` make `[..., outputs]`, of the dtype of `input`.

        Under `torch.autocast` they are of its dtype, but for fp64, which autocast leaves alone.

        Args:
            defer: asked in backward whether the gradient of `weight` is computed later, by `of_weight`.
        """
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        weight = weight.to(input.dtype)
        highest = None
        if not self.recipe.by_rows:
            highest = weight.detach().abs().amax()
            highest = highest if self.whole is None else self.whole(highest)
        with torch.autocast(kind, enabled=False):
            rows = input.reshape(-1, input.shape[-1])
            if rows.shape[0] == 0:  # of an expert that got no tokens
                return F.linear(input, weight, None if bias is None else bias.to(input.dtype))
            output: Tensor = _Float8Product.apply(rows, weight, highest, self, defer)  # type: ignore[no-untyped-call]
            output = output.view(*input.shape[:-1], weight.shape[0])
            return output if bias is None else output + bias.to(output.dtype)

    def of_weight(self, rows: Tensor, grad: Tensor, largest: Tensor | None = None) -> Tensor:
        """The gradient of a weight, `[outputs, inputs]`.

        Args:
            rows: the layer's inputs, `[rows, inputs]`.
            grad: of its outputs, `[rows, outputs]`.
            largest: the largest absolute value of `grad`, where it is known and there is one scale for all.
        """
        inner = -grad.shape[0] % MULTIPLE if grad.is_cuda else 0
        across, inputs = (F.pad(each.t(), (0, inner)) if inner else each.t() for each in (grad, rows))
        left, right = cast(across, self.recipe.of_grad, self.recipe, largest), cast(inputs, E4M3, self.recipe)
        return multiplied(left, right, grad.dtype, fast=self.recipe.by_rows)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, highest: Tensor | None, float8: Float8, defer: Defer | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, highest)
        ctx.float8, ctx.defer, recipe = float8, defer, float8.recipe
        return multiplied(cast(rows, E4M3, recipe), cast(weight, E4M3, recipe, highest), rows.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        check_no_graph(
            "A float8 product", "compute these layers in bf16 (skip=[...] of tz.nn.float8 leaves them alone)"
        )
        rows, weight, highest = ctx.saved_tensors
        recipe, of_rows, of_weight = ctx.float8.recipe, None, None
        largest = None if recipe.by_rows else grad.abs().amax()
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                left, right = cast(grad, recipe.of_grad, recipe, largest), cast(weight.t(), E4M3, recipe, highest)
                of_rows = multiplied(left, right, grad.dtype, fast=recipe.by_rows)
            if ctx.needs_input_grad[1] and not (ctx.defer is not None and ctx.defer(rows, grad)):
                of_weight = ctx.float8.of_weight(rows, grad, largest)
        return of_rows, of_weight, None, None, None
