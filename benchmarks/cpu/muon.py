"""Who is compared where matrices are updated whole: torch's Muon on every rank, and each matrix on one rank.

Hidden matrices are Muon's, and AdamW has the rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import HYPERPARAMETERS, Contender, Counted, Loop
from benchmarks.cpu.models import Block

SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class DdpMuon(Loop):
    """DistributedDataParallel with torch's own optimizers: every rank updates every matrix."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        matrices, others = tz.optim.hidden_matrices(model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = Muon([each for _, each in matrices], **SETTINGS)
        self._adamw = AdamW([each for _, each in others], **HYPERPARAMETERS)

    def update(self) -> None:
        self._adamw.step()
        super().update()
        self._adamw.zero_grad()


class TerrazzoMuon(Counted):
    """One row of the table."""

    def __init__(self, model: nn.Module, case: Case, plan: str) -> None:
        import terrazzo as tz

        super().__init__(model, case)
        matrices, others = tz.optim.hidden_matrices(model)
        optimizer = tz.optim.Muon(matrices, others, **SETTINGS, adamw=HYPERPARAMETERS)
        self.model, self.optimizer = tz.shard(model, optimizer, plan=plan, units=[Block])


CONTENDERS = {
    "ddp-muon": Contender(DdpMuon, "torch.nn.parallel"),
    **{f"terrazzo-{plan}-muon": Contender(partial(TerrazzoMuon, plan=plan), "terrazzo") for plan in ("zero1", "zero3")},
}
