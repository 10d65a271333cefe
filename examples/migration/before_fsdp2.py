"""A script written for torch's FSDP2. Runs on a CPU in seconds:

torchrun --nproc-per-node 2 examples/migration/before_fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(32) for _ in range(4)], nn.Linear(32, 1))
    for layer in model[:4]:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x = torch.randn(32, 32, generator=data)
            loss = nn.functional.mse_loss(model(x), x.pow(2).mean(dim=1, keepdim=True)) / 2
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1} | loss {2 * loss.item():.4f} | grad norm {norm.item():.3f}", flush=True)
    return 2 * loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
