"""Forwards of linear layers of whose matrix a rank uses a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from terrazzo.marks import Mark
from terrazzo.nn.float8_linear import product_of
from terrazzo.nn.forward_replacement import replace_forward
from terrazzo.parallel.tensor.sequence_split import ModuleExchanges

__all__ = ["compute_rows", "sum_outputs"]

_SETTINGS = Mark[Any]("terrazzo_use")
"""On a linear layer with one of the forwards below: what that computes with."""


def sum_outputs(module: nn.Linear, exchanges: ModuleExchanges) -> None:
    """Have a layer that has a part of its inputs sum its outputs over ranks."""
    _SETTINGS.leave(module, exchanges)
    replace_forward(module, _PartialSums.forward)


def compute_rows(module: nn.Linear, rows: tuple[int, int]) -> None:
    """Have a layer that every rank has whole compute a half-open interval of its outputs."""
    _SETTINGS.leave(module, rows)
    replace_forward(module, _SomeRows.forward)


class _PartialSums(nn.Linear):
    """The bias, which every rank has whole, is added once, behind the sum."""

    def forward(self, input: Tensor) -> Tensor:
        summed: Tensor = _SETTINGS.of(self).summed_output(product_of(self)(input, self.weight))
        # Under autocast, which lets an addition compute in the wider dtype, a layer's output is of its product's.
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _SomeRows(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        start, stop = _SETTINGS.of(self)
        bias = None if self.bias is None else self.bias[start:stop]
        return product_of(self)(input, self.weight[start:stop], bias)
