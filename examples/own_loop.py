"""Your own loop, sharded: three lines change. Runs on a CPU in seconds:

terrazzo run --ranks 2 examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz


class Layer(nn.Module):
    """A residual MLP block: the unit that is gathered and released as one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(64) for _ in range(4)], nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model, optimizer = tz.shard(model, optimizer, plan="zero3", units=[Layer])  # 1: shard

    data = torch.Generator().manual_seed(rank)  # every rank draws its own examples
    for step in range(60):
        for last in (False, True):  # two micro-batches per step
            x = torch.randn(32, 64, generator=data)
            target = x.pow(2).mean(dim=1, keepdim=True)
            if last:
                loss = nn.functional.mse_loss(model(x), target) / 2
                loss.backward()
            else:
                with tz.accumulate(model):  # 2: this one's gradients are not the step's last
                    (nn.functional.mse_loss(model(x), target) / 2).backward()
        norm = tz.clip_grad_norm_(model, 1.0)  # 3: the norm over all shards
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1} | loss {2 * loss.item():.4f} | grad norm {norm.item():.3f}", flush=True)

    with tz.gathered(model) as parameters:  # full values, by their original names
        total = sum(values.norm() ** 2 for values in parameters.values()) ** 0.5
    if rank == 0:
        print(f"norm of all {len(parameters)} parameters: {total:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
