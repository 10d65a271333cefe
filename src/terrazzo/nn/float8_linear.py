"""Linear layers whose matrix products are of 8-bit floats, and what any linear layer multiplies with."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.marks import Mark
from terrazzo.nn.float8_products import Float8

__all__ = ["FLOAT8", "Float8Linear", "product_of"]

FLOAT8 = Mark[Float8]("terrazzo_float8")
"""On linear layers that have been converted."""


class Float8Linear(nn.Linear):
    """The forward and the `extra_repr` that a converted linear layer gets."""

    def forward(self, input: Tensor) -> Tensor:
        return product_of(self)(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        recipe = FLOAT8.of(self).recipe.name
        return f"{nn.Linear.extra_repr(self)}, float8={recipe}"


def product_of(module: nn.Linear) -> Callable[..., Tensor]:
    """What a linear layer multiplies with: `F.linear`, or 8-bit products in one that `float8` has converted."""
    float8 = FLOAT8.find(module)
    return F.linear if float8 is None else float8
