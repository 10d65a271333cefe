"""Linear layers whose three matrix products, one in forward and two in backward, are of 8-bit floats.

`y = x Wᵀ`, `dx = dy W` and `dW = dyᵀ x` each multiply two matrices that have just been cast: scaled, so that the
largest absolute value becomes the largest of the format, and rounded. Products are summed in fp32 and brought back by
both scales. Two recipes, with the numbers of torchao's of the same names (Float8LinearConfig, torchao 0.18):

- `tensorwise`: one scale for a whole matrix; x and W in e4m3, dy in e5m2, which has more range and is less precise
- `rowwise`: one for each row of the left matrix and each column of the right one, a power of two; all in e4m3

What is kept for backward is x and W as they are, as torch's own linear layer keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.errors import BadInput, did_you_mean
from terrazzo.marks import Mark
from terrazzo.nn.single_backward import check_no_graph

__all__ = [
    "E4M3",
    "E5M2",
    "FLOAT8",
    "MULTIPLE",
    "RECIPES",
    "Float8",
    "Float8Linear",
    "Recipe",
    "multiplies",
    "product_of",
    "recipe_named",
]

PutOff = Callable[[Tensor, Tensor], bool]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12
"""A matrix of nothing but zeros is scaled as if this were its largest value."""
MULTIPLE = 16
"""Both sizes of a weight are multiples of it: what the matrix units of GPUs take."""
_EXPONENT = 0x7F800000
"""The bits of an fp32's exponent."""


@dataclass(frozen=True)
class Recipe:
    """How matrices become 8-bit floats.

    Attributes:
        name: of the recipe.
        of_grad: the format of the gradients of outputs; inputs and weights are e4m3.
        by_rows: one scale for each row rather than one for all, a power of two.
    """

    name: str
    of_grad: torch.dtype
    by_rows: bool


RECIPES = {
    each.name: each for each in (Recipe("tensorwise", E5M2, by_rows=False), Recipe("rowwise", E4M3, by_rows=True))
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises: `BadInput` with the nearest."""
    if name not in RECIPES:
        raise BadInput(
            f"There is no float8 recipe {name!r}.{did_you_mean(str(name), RECIPES)} Recipes are {', '.join(RECIPES)}."
        )
    return RECIPES[name]


@dataclass(frozen=True)
class Float8:
    """The products of one linear layer.

    Attributes:
        recipe: how they are made.
        whole: of this rank's part of a matrix that is cut: the largest of all ranks' values of one. Collective.
    """

    recipe: Recipe
    whole: Callable[[Tensor], Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8:
        return self

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, put_off: PutOff | None = None
    ) -> Tensor:
        """`F.linear`: `[..., inputs]` and `[outputs, inputs]` make `[..., outputs]`, of the dtype of `input`.

        Under `torch.autocast` they are of its dtype, but for fp64, which autocast leaves alone.

        Args:
            put_off: is given what `of_weight` makes the gradient of `weight` of, and says whether that is put off.
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
            output: Tensor = _Float8Product.apply(rows, weight, highest, self, put_off)  # type: ignore[no-untyped-call]
            output = output.view(*input.shape[:-1], weight.shape[0])
            return output if bias is None else output + bias.to(output.dtype)

    def of_weight(self, rows: Tensor, grad: Tensor, largest: Tensor | None = None) -> Tensor:
        """The gradient of a weight, of inputs `[rows, inputs]` and the outputs' gradient `[rows, outputs]`.

        Args:
            largest: absolute value of `grad`, where it is known and there is one scale for all.
        """
        inner = -grad.shape[0] % MULTIPLE if grad.is_cuda else 0
        across, inputs = (F.pad(each.t(), (0, inner)) if inner else each.t() for each in (grad, rows))
        left, right = _cast(across, self.recipe.of_grad, self.recipe, largest), _cast(inputs, E4M3, self.recipe)
        return _multiplied(left, right, grad.dtype, fast=self.recipe.by_rows)


FLOAT8 = Mark[Float8]("terrazzo_float8")
"""On linear layers that have been converted."""


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, highest: Tensor | None, float8: Float8, put_off: PutOff | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, highest)
        ctx.float8, ctx.put_off, recipe = float8, put_off, float8.recipe
        return _multiplied(_cast(rows, E4M3, recipe), _cast(weight, E4M3, recipe, highest), rows.dtype, fast=True)

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
                left, right = _cast(grad, recipe.of_grad, recipe, largest), _cast(weight.t(), E4M3, recipe, highest)
                of_rows = _multiplied(left, right, grad.dtype, fast=recipe.by_rows)
            if ctx.needs_input_grad[1] and not (ctx.put_off is not None and ctx.put_off(rows, grad)):
                of_weight = ctx.float8.of_weight(rows, grad, largest)
        return of_rows, of_weight, None, None, None


@dataclass(frozen=True)
class _Codes:
    """A matrix in 8 bits, `values * scale` of which is what it stands for: one fp32 scale, or `[rows, 1]` of them."""

    values: Tensor
    scale: Tensor


def _cast(matrix: Tensor, dtype: torch.dtype, recipe: Recipe, highest: Tensor | None = None) -> _Codes:
    """`[rows, inner]` as codes, contiguous; `highest`: its largest absolute value where that is known.

    In fp64 where scales are found, so that a compiled graph has the bits that eager has.
    """
    if recipe.by_rows:
        highest = matrix.abs().amax(dim=1, keepdim=True)
    elif highest is None:
        highest = matrix.abs().amax()
    most = torch.finfo(dtype).max
    factor = (most / highest.double().clamp(min=SMALLEST)).float()
    if recipe.by_rows:
        factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)  # the power of two at or below it
    wide = matrix.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return _Codes(wide.mul_(factor).clamp_(-most, most).to(dtype), factor.double().reciprocal().float())


def _multiplied(left: _Codes, right: _Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """`[rows, inner]` times `[columns, inner]ᵀ`, summed in fp32; `fast`: in the matrix units' own accumulators.

    On a CPU what `torch._scaled_mm` computes there: codes brought back first, then multiplied.
    """
    if not left.values.is_cuda:
        return ((left.values.float() * left.scale) @ (right.values.float() * right.scale).t()).to(dtype)
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class Float8Linear(nn.Linear):
    """The forward that a converted linear layer gets, and what it says of itself."""

    def forward(self, input: Tensor) -> Tensor:
        return product_of(self)(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        recipe = FLOAT8.of(self).recipe.name
        return f"{nn.Linear.extra_repr(self)}, float8={recipe}"


def multiplies(recipe: Recipe, device: torch.device) -> None:
    """Try what `recipe` multiplies with on a device. Raises: what torch does where it cannot."""
    tried = torch.zeros(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device)
    for of_left in (E4M3, recipe.of_grad):
        _multiplied(_cast(tried, of_left, recipe), _cast(tried, E4M3, recipe), tried.dtype, fast=True)


def product_of(module: nn.Linear) -> Callable[..., Tensor]:
    """What a linear layer multiplies with: `F.linear`, or 8-bit products in one that `float8` has converted."""
    float8 = FLOAT8.find(module)
    return F.linear if float8 is None else float8
