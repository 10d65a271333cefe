"""The same program as before_fsdp1.py with `tz.shard`.

torchrun --nproc-per-node 2 examples/migration/after_fsdp1.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz


class Layer(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(steps: int = 40) -> list[float]:
    """The loss of every step on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(32) for _ in range(4)], nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = tz.shard(model, optimizer, plan="zero3", units=[Layer])

    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        first, second = torch.randn(2, 32, 32, generator=data)
        with tz.accumulate(model):
            nn.functional.mse_loss(model(first), first.pow(2).mean(dim=1, keepdim=True)).div(2).backward()
        loss = nn.functional.mse_loss(model(second), second.pow(2).mean(dim=1, keepdim=True))
        loss.div(2).backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[-1])
    dist.destroy_process_group()
