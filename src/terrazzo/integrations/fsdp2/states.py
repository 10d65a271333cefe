"""State dicts in torch's own form: each tensor a DTensor, split by rows over the mesh that `fully_shard` was given.

In flat memory a rank's part is no run of rows, so these are copies, made one unit at a time. Every call is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from terrazzo.engine import ModelState, whole_weights

__all__ = ["RowPlacements", "place", "whole_value"]


class RowPlacements:
    """How tensors are shown: replicated over all axes of a mesh but the last, and split by rows over that."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.placements = mesh, placements_on(mesh)

    def split(self, values: Tensor) -> DTensor:
        """This rank's rows of a tensor that every rank has whole, as a copy."""
        local = distribute_tensor(values.detach(), self.mesh, self.placements, src_data_rank=None).to_local()
        return DTensor.from_local(
            local.clone(), self.mesh, self.placements, run_check=False, shape=values.shape, stride=values.stride()
        )

    def of_module(
        self,
        module: nn.Module,
        sharded: nn.Module | None,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
    ) -> dict[str, Any]:
        """What `state_dict()` of a module lists, its parameters split by rows: master weights where there are any.

        Args:
            sharded: the model that it is a part of; None for one that is not sharded yet.
            destination, prefix: as torch has them.
        """
        state: Any = nn.Module.state_dict(module, prefix=prefix, keep_vars=True)
        own = {id(each): each for each in module.parameters()}
        shown: dict[int, DTensor] = {}
        for key, values in _whole(own, sharded):
            dtype = values.dtype if own[key].requires_grad else torch.promote_types(values.dtype, own[key].dtype)
            shown[key] = self.split(values.to(dtype))
        found = {name: shown[id(value)] if id(value) in shown else _detached(value) for name, value in state.items()}
        if destination is None:
            return found
        getattr(destination, "_metadata", {}).update(state._metadata)  # versions of modules, where a parent keeps them
        destination.update(found)
        return destination


def _whole(own: Mapping[int, nn.Parameter], sharded: nn.Module | None) -> Iterator[tuple[int, Tensor]]:
    """These parameters in full, one after the other."""
    if sharded is None:
        yield from own.items()
        return
    named = dict(sharded.named_parameters())
    ordered = [each.name for each in ModelState(sharded).parameters() if id(named[each.name]) in own]
    for name, values in whole_weights(sharded, ordered):
        yield id(named[name]), values


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value


def placements_on(mesh: DeviceMesh | None) -> tuple[Placement, ...]:
    """The placements on a mesh; None for one of a single axis."""
    replicated: tuple[Placement, ...] = (Replicate(),) * (0 if mesh is None else mesh.ndim - 1)
    return (*replicated, Shard(0))


def place(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Let parameters say how `state_dict()` shows them, as torch's do."""
    for parameter in parameters:
        parameter.placements = placements_on(mesh)  # type: ignore[attr-defined]


def whole_value(value: Any) -> Any:
    """A DTensor in full, one that is whole as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value
