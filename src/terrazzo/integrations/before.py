"""What every door looks at, and does to a model, before it shards it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from terrazzo.engine.sharding.mesh_checks import exchanged_along
from terrazzo.errors import BadInput
from terrazzo.nn import float8

__all__ = ["check_data_parallel", "convert_linears"]


def convert_linears(model: nn.Module, recipe: str, skip: Sequence[str] | None) -> None:
    """Have linear layers multiply in 8 bits, as `tz.nn.float8` does, and say on the first rank which do."""
    found = float8(model, recipe, skip=skip)
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger("terrazzo").warning("%s", found)


def check_data_parallel(model: nn.Module) -> None:
    """Refuse a model that `tz.parallelize` has given to ranks that see the same batches.

    Other libraries deal out a batch to each rank, and arrange ranks by data axes: their groups would be others.

    Raises:
        BadInput: there.
    """
    if axes := sorted(exchanged_along(model)):
        raise BadInput(
            f"The {type(model).__name__} went through tz.parallelize, so ranks along {' and '.join(axes)} have to see "
            "the same batches, and here each rank is data parallel. Shard it in a loop of your own, by tz.shard(model, "
            "optimizer, plan, mesh=mesh); or train it with terrazzo train, where plan.mesh says the same; or leave "
            "tz.parallelize out."
        )
