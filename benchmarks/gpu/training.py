"""A small decoder and its steps, under a plan or in plain PyTorch: what the checks of a GPU compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import terrazzo as tz
from benchmarks.gpu.contenders import Workload
from terrazzo.engine.mesh.meshes import data_mesh
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig

__all__ = ["ADAMW", "SMALL", "Training", "apart", "same"]

SMALL = Workload(DecoderConfig(512, 128, 3, 4, 2, 256, 64), batch=2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True)


class Training:
    """The small decoder under one plan, or in plain PyTorch where `plan` is None; the same batches for all."""

    def __init__(
        self,
        plan: str | None,
        precision: str = "fp32",
        model: nn.Module | None = None,
        adamw: Callable[..., torch.optim.Optimizer] = ADAMW,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.plain = model or Decoder(SMALL.model), plan is None
        if plan is None:
            self.model.cuda()
            self.optimizer: Any = adamw(self.model.parameters())
        else:
            mesh = data_mesh("cuda", dist.get_world_size())
            self.model, self.optimizer = tz.shard(
                self.model, adamw, plan, units=[Block], precision=precision, mesh=mesh, **options
            )
        self.steps = 0

    def step(self, clip: bool = False, micro: int = 1, update: bool = True) -> Tensor:
        """The loss of the last micro-batch, on the device."""
        for number in range(micro):
            last = number == micro - 1
            seed = torch.Generator().manual_seed(1000 * self.steps + number)
            tokens = torch.randint(SMALL.model.vocab_size, (2, 65), generator=seed).pin_memory()
            tokens = tokens.to("cuda", non_blocking=True)
            with contextlib.nullcontext() if last or self.plain else tz.accumulate(self.model):
                logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
        if clip:
            tz.clip_grad_norm_(self.model, 1.0)
        if update:
            self.update()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, steps: int) -> Training:
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        """Full, on the host."""
        whole = contextlib.nullcontext(dict(self.model.named_parameters())) if self.plain else tz.gathered(self.model)
        with whole as found:
            return {name: weight.detach().cpu().clone() for name, weight in found.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all weights have equal bits."""
    return all(torch.equal(one[name], other[name]) for name in one)


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, of the largest weight."""
    most = max(float(weight.abs().max()) for weight in one.values())
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one) / most
