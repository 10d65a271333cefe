"""Who is compared: each contender turns the same plain model into its own model and optimizer.

Every one is set up as its documentation recommends for this model: one unit per block, and the options that
save copies switched on. Libraries are imported only by the contender that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.cases import Block

Contender = Callable[[nn.Module], tuple[nn.Module, Optimizer]]

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def _adamw(parameters: Iterable[nn.Parameter]) -> AdamW:
    return AdamW(parameters, **HYPERPARAMETERS)


def ddp(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, _adamw(wrapped.parameters())


def zero_redundancy(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """DistributedDataParallel with torch's ZeRO-1 optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=AdamW, parameters_as_bucket_view=True, **HYPERPARAMETERS
    )
    return wrapped, optimizer


def fsdp1(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """FullyShardedDataParallel, FULL_SHARD."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return wrapped, _adamw(wrapped.parameters())


def fsdp2(model: nn.Module, reshard_after_forward: bool) -> tuple[nn.Module, Optimizer]:
    """fully_shard on each block, then on the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model, _adamw(model.parameters())


def terrazzo(model: nn.Module, plan: str) -> tuple[nn.Module, Optimizer]:
    """One row of the table."""
    import terrazzo as tz

    optimizer = _adamw(model.parameters())
    return tz.shard(model, optimizer, plan=plan, units=[Block], precision="fp32")


CONTENDERS: dict[str, Contender] = {
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp1": fsdp1,
    "fsdp2": partial(fsdp2, reshard_after_forward=True),
    "fsdp2-keep": partial(fsdp2, reshard_after_forward=False),
    "terrazzo-zero0": partial(terrazzo, plan="zero0"),
    "terrazzo-zero1": partial(terrazzo, plan="zero1"),
    "terrazzo-zero2": partial(terrazzo, plan="zero2"),
    "terrazzo-zero3": partial(terrazzo, plan="zero3"),
    "terrazzo-shard_grad_op": partial(terrazzo, plan="shard_grad_op"),
}
