"""Virtual times of a step beside torch's FSDP2 on the same device: a block's forward takes 1 ms, its backward 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import terrazzo as tz
from hostcuda.device import Watching, report, virtual

__all__ = ["faults_of_fsdp2", "step_ms"]

WIDTH, TOKENS, DEPTH, LAYERS = 128, 64, 8, 6
NUMEL = LAYERS * WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def step_ms(plan: str, gather_ms: float, all_reduce_ms: float = 0.0) -> float:
    """Of one step in bf16, with fp32 gradients.

    Args:
        plan: or `fsdp2`.
        gather_ms: what the gather of a block's weights takes among neighbours; its reduction takes twice that.
        all_reduce_ms: what summing a block's shard takes between pairs of them; 0 for one mesh axis.
    """
    before = vars(virtual.LINKS).copy()
    virtual.set_speeds(flops=2 * NUMEL * TOKENS / 1e-3, memory=1e15, pcie=1e15)
    near = dist.get_world_size() // (2 if all_reduce_ms else 1)
    virtual.LINKS.near = NUMEL * 2 * (near - 1) / near / (gather_ms * 1e-3)
    if all_reduce_ms:
        virtual.LINKS.far = NUMEL * 4 / near / (all_reduce_ms * 1e-3)
    try:
        shape = (2, near) if all_reduce_ms else (near,)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        return _measured(*_sharded(plan, mesh))
    finally:
        vars(virtual.LINKS).update(before)
        virtual.set_speeds()


def _sharded(plan: str, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 8, bias=False))
    adamw: Callable[..., Any] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # noqa: E731
    if plan != "fsdp2":
        return tz.shard(model, adamw, plan, units=[Block], precision="bf16", mesh=mesh)
    model.to("cuda")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model[:DEPTH]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, adamw(model.parameters())


def _measured(model: nn.Module, optimizer: Any) -> float:
    """Of a step among others: three steps take so much longer than one. What ends a step may be hidden in the next."""
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    ends = []
    for steps in (1, 1, 3):
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        ends.append(virtual.now_s())
    first, short, long = ends
    return ((long - short) - (short - first)) / 2 * 1e3


def faults_of_fsdp2() -> list[str]:
    """What the device has against torch's own FSDP2."""
    report.take()
    with Watching():
        _measured(*_sharded("fsdp2", init_device_mesh("cuda", (dist.get_world_size(),))))
    return [str(fault) for fault in report.faults]
