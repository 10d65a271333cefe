"""One training in an Accelerate script's words, run with Accelerate's own class and with Terrazzo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Weights = dict[str, torch.Tensor]


def fresh_state() -> None:
    """Let the next Accelerator of this process start anew, on the gloo group that the test's process is in."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ.update(LOCAL_WORLD_SIZE=os.environ.get("WORLD_SIZE", "1"), OMP_NUM_THREADS="1", MASTER_ADDR="localhost")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 1))


def loader(size: int = 60) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 16, generator=generator)
    return DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=4, shuffle=True)


@dataclass
class Loop:
    """Everything an Accelerate script holds, prepared."""

    accelerator: Any
    clip: float | None = None
    value: float | None = None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = small_model()
        # torch's defaults differ by where parameters are: one kernel on both sides
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
        prepared = self.accelerator.prepare(scheduler, optimizer, loader(), model)  # in any order
        self.scheduler, self.optimizer, self.data, self.model = prepared

    def epoch(self) -> None:
        accelerator = self.accelerator
        for x, y in self.data:
            with accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.clip:
                    self.losses.append(float(accelerator.clip_grad_norm_(self.model.parameters(), self.clip)))
                if accelerator.sync_gradients and self.value:
                    accelerator.clip_grad_value_(self.model.parameters(), self.value)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses += accelerator.gather(loss.detach().reshape(1)).tolist()

    def weights(self) -> Weights:
        full = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("module."): values.clone() for name, values in full.items()}


def train(
    make: Callable[..., Any],
    clip: float | None = None,
    epochs: int = 2,
    value: float | None = None,
    **arguments: Any,
) -> Any:
    """Losses and norms, final weights, and learning rate."""
    fresh_state()
    loop = Loop(make(cpu=True, **arguments), clip, value)
    for _ in range(epochs):
        loop.epoch()
    return loop.losses, loop.weights(), loop.scheduler.get_last_lr()


def distance(one: Any, other: Any) -> float:
    """Between two results of `train`, the largest difference of any loss or weight."""
    assert len(one[0]) == len(other[0])
    assert one[1].keys() == other[1].keys()
    assert one[2] == other[2]
    losses = [abs(a - b) for a, b in zip(one[0], other[0], strict=True)]
    return max([*losses, *(float((one[1][name] - other[1][name]).abs().max()) for name in one[1])])
