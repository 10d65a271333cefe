"""Matrices in 8-bit floats: two recipes, how a matrix is cast by one, and products of two that have been cast.

A matrix is scaled so that its largest absolute value becomes the largest of the format, and rounded. Products are
summed in fp32 and multiplied by both scales. The recipes have the numbers of torchao's of the same names
(Float8LinearConfig, torchao 0.18):

- `tensorwise`: one scale for a whole matrix; inputs and weights in e4m3, gradients in e5m2, which has more range and
  less precision
- `rowwise`: one scale for each row of the left matrix and each column of the right one, a power of two; all in e4m3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean

__all__ = [
    "E4M3",
    "E5M2",
    "MULTIPLE",
    "RECIPES",
    "Codes",
    "Recipe",
    "cast",
    "check_multiplies",
    "multiplied",
    "recipe_named",
]

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
    """The recipe of that name.

    Raises:
        BadInput: there is none.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise BadInput(
            f"There is no float8 recipe {name!r}.{did_you_mean(str(name), RECIPES)} Recipes are {', '.join(RECIPES)}."
        )
    return RECIPES[name]


@dataclass(frozen=True)
class Codes:
    """A matrix in 8 bits.

    Attributes:
        values: `[rows, inner]`, in an 8-bit format.
        scale: fp32; `values * scale` is the matrix. One number, or `[rows, 1]`.
    """

    values: Tensor
    scale: Tensor


def cast(matrix: Tensor, dtype: torch.dtype, recipe: Recipe, highest: Tensor | None = None) -> Codes:
    """`[rows, inner]` in 8 bits, contiguous.

    Scales are computed in fp64, so that a compiled graph has the bits of eager.

    Args:
        highest: the largest absolute value of the matrix, where it is known.
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
    return Codes(wide.mul_(factor).clamp_(-most, most).to(dtype), factor.double().reciprocal().float())


def multiplied(left: Codes, right: Codes, dtype: torch.dtype, fast: bool) -> Tensor:
    """`[rows, inner]` times `[columns, inner]ᵀ`, summed in fp32, as `dtype`.

    On a CPU it is what `torch._scaled_mm` computes there, up to the order of sums: both are scaled back, and then
    multiplied.

    Args:
        fast: sums are in the matrix units' own accumulators.
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


def check_multiplies(recipe: Recipe, device: torch.device) -> None:
    """Try the products of `recipe` on a device, with matrices of 16 by 16.

    Raises:
        RuntimeError, AssertionError, NotImplementedError: from torch, where the device does not have them.
    """
    tried = torch.zeros(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device)
    for of_left in (E4M3, recipe.of_grad):
        multiplied(cast(tried, of_left, recipe), cast(tried, E4M3, recipe), tried.dtype, fast=True)
