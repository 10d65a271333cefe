"""Hooks on the weights of a pipeline's linear maps, against one process of plain PyTorch."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import terrazzo as tz
from tests.helpers.threads import run_in_threads


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_hooks_see_each_micro_batchs_gradient(schedule, plan: str) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)) for _ in range(4)]
    plain = copy.deepcopy(base)
    for place in (0, 2):
        plain[place].weight.register_hook(lambda grad: grad * 3)
    for inputs, targets in batches:
        F.mse_loss(plain(inputs), targets).backward()
    wanted = torch.linalg.vector_norm(torch.stack([each.grad for each in plain.parameters()])).item()

    def body(rank: int):
        model, mesh, calls = copy.deepcopy(base), tz.mesh(pp=2, device="cpu"), Counter()
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule))
        model, _ = tz.shard(model, None, plan, mesh=mesh)
        own = model[2 * rank].weight, model[2 * rank + 1].weight
        own[0].register_hook(lambda grad: grad * 3)
        own[1].register_post_accumulate_grad_hook(lambda parameter: calls.update([parameter.grad.shape]))
        tz.step(model, batches, F.mse_loss)
        return tz.clip_grad_norm_(model, 1e9).item(), dict(calls)

    assert run_in_threads(2, body) == [(pytest.approx(wanted, rel=1e-6), {torch.Size([4, 4]): 4})] * 2
