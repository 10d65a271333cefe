"""Table of the parameters of a whole model, a row for each, also of those that ranks with other stages have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.unit_members import parameters_by_names
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.states.model_state import ModelState

__all__ = ["TableRow", "parameter_table"]

_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@dataclass(frozen=True)
class TableRow:
    """A row: one parameter, whichever ranks have it.

    Attributes:
        names: all that it has in the model, its own first.
        shape: the whole parameter's.
        dtype: of its weight, the master weight where there is one.
        group: number of its param group among those of all optimizers; -1 for none.
        is_stepped: whether an optimizer keeps states of it.
        stage: rank along the axis of stages that has it; 0 where there is none.
        position: its number among those of that rank, bucket by bucket.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    is_stepped: bool
    stage: int
    position: int

    @property
    def name(self) -> str:
        return self.names[0]


def parameter_table(model: nn.Module) -> list[TableRow]:
    """A row for each parameter of a sharded model, in the model's order. Collective where ranks have stages of it."""
    axes = engine_of(model).axes
    shapes = {names: tuple(parameter.shape) for names, parameter in parameters_by_names(model).items()}
    own = {info.name: (position, info) for position, info in enumerate(ModelState(model).parameters())}
    stage, buckets = axes.pp_rank, engine_of(model).buckets()
    primary = {slot.name for bucket in buckets if bucket.counted.here for slot in bucket.slots}
    table = torch.zeros((len(shapes), 5), dtype=torch.int64, device=HOST)  # of what other ranks have, lower than theirs
    for row, (name, *_) in zip(table, shapes, strict=True):
        if name in primary:
            position, info = own[name]
            numbers = [stage, position, _DTYPES.index(info.dtype), info.group + 1, info.states is not None]
            row.copy_(torch.tensor(numbers, device=HOST))
    agreed = axes.maximum(table, axes.stage_axis).tolist()
    return [
        TableRow(
            names, own[names[0]][1].shape if names[0] in own else shape, _DTYPES[dtype], group - 1, bool(stepped),
            holder, position,
        )
        for (names, shape), (holder, position, dtype, group, stepped) in zip(shapes.items(), agreed, strict=True)
    ]  # fmt: skip
