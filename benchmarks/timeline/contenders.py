"""Who is compared on the simulated device: each makes a model and an optimizer that train it.

All compute in bf16, reduce gradients in fp32, and keep fp32 masters. DDP's own reducer calls collectives from C++ and
asks for a timer of torch's CUDA wheel, so it does not run here; torch's `replicate`, data parallelism by what FSDP2 is
made of, stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import terrazzo as tz
from benchmarks.timeline.model import Block, Model

__all__ = ["CONTENDERS", "Trainee"]


@dataclass
class Trainee:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: Any


def _adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _terrazzo(model: Model, mesh: DeviceMesh, plan: str) -> Trainee:
    return Trainee(*tz.shard(model, _adamw, plan, units=[Block], precision="bf16", mesh=mesh))


def _fsdp2(model: Model, mesh: DeviceMesh, reshard_after_forward: bool = True, offload: bool = False) -> Trainee:
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    if not offload:
        model.to("cuda")
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    return Trainee(model, _adamw(model.parameters()))


def _replicate(model: Model, mesh: DeviceMesh) -> Trainee:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        replicate(module.to("cuda"), mesh=mesh, mp_policy=policy)
    return Trainee(model, _adamw(model.parameters()))


CONTENDERS: dict[str, Callable[[Model, DeviceMesh], Trainee]] = {
    "replicate": _replicate,
    "fsdp2": _fsdp2,
    "fsdp2-keep": partial(_fsdp2, reshard_after_forward=False),
    "fsdp2-offload": partial(_fsdp2, offload=True),
    **{
        plan: partial(_terrazzo, plan=plan)
        for plan in (
            "zero0", "zero1", "zero2", "zero3", "shard_grad_op", "zero3@cpu-all", "hybrid_shard", "hybrid_shard_zero2",
        )
    },
}  # fmt: skip
