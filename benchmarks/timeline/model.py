"""What is trained: blocks of a transformer without attention's own arithmetic, which moves no parameters.

A model of this width and so many tokens is simulated at 1 / `SCALE` of both, on a device that is slower by as much: all
FLOPs shrink by SCALE ** 3 and all bytes by SCALE ** 2, so that every kernel, copy and collective takes the time that it
would take at full size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape

__all__ = ["DEPTH", "SCALE", "WIDTH", "Block", "Model", "shape"]

WIDTH, DEPTH = 4096, 8
SCALE = 32


class Block(nn.Module):
    """Two matrices in attention's place, and an MLP of four times the width: 10 width² parameters and two norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same shape."""
        x = x + self.out(self.mix(self.norm1(x)))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Model(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same shape."""
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.norm(x)
        return result


def shape() -> ModelShape:
    """The same at its own size, for the planner."""
    with torch.device("meta"):
        model = Model(WIDTH)
    block = BlockShape(WIDTH, 0, 0, 1, 4 * WIDTH, gated=False, norm="layer", torch_norm=True)
    units = UnitShape("", _tensors(model.norm)), UnitShape("blocks", _tensors(model.blocks[0]), DEPTH, block)
    return ModelShape("blocks", units)


def _tensors(module: nn.Module) -> tuple[TensorShape, ...]:
    roles = {1: "vector", 2: "matrix"}
    return tuple(TensorShape(name, tuple(p.shape), roles[p.dim()]) for name, p in module.named_parameters())  # type: ignore[arg-type]
