"""8-bit products of layers whose matrices are cut: ranks compute one scale for the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from terrazzo.engine import Record
from terrazzo.errors import BadInput
from terrazzo.nn.float8_linear import FLOAT8
from terrazzo.nn.float8_matrices import MULTIPLE
from terrazzo.nn.float8_products import Float8
from terrazzo.parallel.tensor.tensor_cuts import TensorCuts

__all__ = ["check_scales", "share_scales"]

RecordsByParameter = Mapping[tuple[str, str], Record]
RowsByModule = Mapping[str, tuple[int, int]]


def check_scales(model: nn.Module, records: RecordsByParameter, rows: RowsByModule) -> None:
    """Raise `BadInput` for a layer in 8 bits, if this rank's part of its matrix does not fit the GPU's matrix units.

    Args:
        records: of parameters, by the names of their modules and their own.
        rows: the half-open interval of outputs that a rank computes of a matrix that it has whole, by module.
    """
    for name, module, _ in _converted(model, records, rows):
        start, stop = rows.get(name, (0, 0))
        shape = (stop - start, module.in_features) if name in rows else records[name, "weight"].box.local_shape
        if any(size % MULTIPLE for size in shape):
            raise BadInput(
                f"{name!r} multiplies in float8, and of its {module.out_features} x {module.in_features} matrix a rank "
                f"along tp has {shape[0]} x {shape[1]}, whose sizes are no multiples of {MULTIPLE}: leave it out of "
                "float8 (skip), or take another tp."
            )


def share_scales(cuts: TensorCuts) -> None:
    """Have the ranks along `tp` compute the largest value of each matrix together, outside of compiled graphs."""
    for name, module, float8 in _converted(cuts.model, cuts.records, cuts.rows):
        highest: Any = torch.compiler.disable(cuts.ranks_at(name).maximum)
        FLOAT8.leave(module, replace(float8, whole=highest))


def _converted(model: nn.Module, records: RecordsByParameter, rows: RowsByModule) -> Iterator[tuple[str, Any, Float8]]:
    """Layers in 8 bits of whose matrix each rank has, or uses, a part."""
    cut = {name for (name, attribute), record in records.items() if attribute == "weight" and not record.box.is_all}
    for name in sorted(cut | {*rows}):
        module = model.get_submodule(name)
        if (float8 := FLOAT8.find(module)) is not None:
            yield name, module, float8
