"""What a contender is: a plain model's training loop, as one library writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from benchmarks.cpu.cases import Case

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


class Loop:
    """A model and its optimizer, and how one step of them is written."""

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case

    def not_last(self) -> AbstractContextManager[Any]:
        """Around a micro-batch whose gradients need not be complete on every rank yet."""
        return nullcontext()

    def computing(self) -> AbstractContextManager[Any]:
        """Around forward."""
        return nullcontext()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean over a micro-batch, int64 [batch, sequence] each."""
        logits = self.model(tokens).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())

    def micro_batches(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Forward and backward of a step's micro-batches; the mean of their losses."""
        losses = []
        for index, (tokens, targets) in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else self.not_last():
                with self.computing():
                    loss = self.loss(tokens, targets)
                self.backward(loss / len(batches), last)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def shown(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss as others have it that do not share sequences; no part of the step."""
        return loss

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward of one micro-batch, whose loss is scaled already."""
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]

    def clip(self, norm: float) -> None:
        """Clip by the global norm."""
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def update(self) -> None:
        """The optimizer's step."""
        if self.case.clip is not None:
            self.clip(self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sent_bytes(self) -> int | None:
        """What this rank has handed to others so far, where the contender counts it itself."""
        return None


class Counted(Loop):
    """Counts what it sends: a sharded model of Terrazzo."""

    def sent_bytes(self) -> int | None:
        from terrazzo.engine import engine_of

        return engine_of(self.model).traffic.total_bytes


@dataclass(frozen=True)
class Contender:
    """A loop, and the library that it needs.

    Attributes:
        trains: whether its losses are those of the others.
    """

    start: Callable[[nn.Module, Case], Loop]
    library: str
    trains: bool = True


def deepspeed_config(
    stage: int, bf16: bool, batch: int, accumulate: int = 1, clip: float | None = None
) -> dict[str, Any]:
    """Of a ZeRO stage that sums in fp32, as the others do; its overlap is left at the stage's default."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "communication_data_type": "fp32",
        "gradient_clipping": clip or 0.0,
        "steps_per_print": 1_000_000,
    }


def adamw(parameters: Iterable[nn.Parameter]) -> AdamW:
    """Of those that are trained."""
    return AdamW((p for p in parameters if p.requires_grad), **HYPERPARAMETERS)


def autocast(case: Case) -> AbstractContextManager[Any]:
    """Around the forward of a contender that keeps fp32 weights."""
    return torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16")
