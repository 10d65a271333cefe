"""Gradients that are no numbers: plain PyTorch goes on with the next step, and so does what is off the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import terrazzo as tz
from tests.helpers.threads import run_in_threads

MODEL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("plan", ["zero2", "zero2@cpu", "zero3@cpu"])
def test_zeroed_gradients_forget_the_norm_that_was_no_number(plan: str) -> None:
    batch = torch.ones(2, 6)

    def run(rank: int) -> bool:
        model = copy.deepcopy(MODEL)
        model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), plan=plan, units=[nn.Linear])
        model(batch * float("nan")).sum().backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.zero_grad(set_to_none=False)
        model(batch).sum().backward()
        return bool(torch.isfinite(tz.clip_grad_norm_(model, 1.0)))

    assert all(run_in_threads(2, run))
