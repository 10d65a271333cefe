"""Optimizers whose step does more than torch's own, and lists of param groups that were changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from tests.engine.toys import Net, assert_close, batch, full_parameters, loss_of, on_ranks, step


class Decaying(torch.optim.SGD):
    """Decays every parameter before its step."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return super().step(closure)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("zero1", {}),
        ("zero2@cpu", {}),
        ("zero2@cpu", {"offload": tz.Offload(step="synchronous")}),
        ("zero3", {"precision": tz.Precision(moments="bf16")}),
    ],
)
def test_each_parameter_is_decayed_once(plan: str, options: dict[str, Any]) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Decaying(alone.parameters(), lr=0.1)
    for number in range(3):
        step(alone, optimizer, loss_of(alone, batch(number)))

    def body(rank: int) -> tuple[dict[str, Tensor], int]:
        own = copy.deepcopy(base)
        model, own_optimizer = tz.shard(own, Decaying(own.parameters(), lr=0.1), plan, **options)
        for number in range(3):
            step(model, own_optimizer, loss_of(model, batch(number)))
        return full_parameters(model), len(own_optimizer.param_groups[0]["params"])

    for found, shown in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)
        assert shown > 0  # between steps, a group has its tensors


@pytest.mark.parametrize("plan", ["zero0", "zero2@cpu"])
@pytest.mark.parametrize("change", [list.pop, list.reverse])
def test_a_list_of_groups_that_was_changed_is_refused(plan: str, change: Any) -> None:
    def body(rank: int) -> None:
        base = Net()
        parameters = list(base.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]
        model, optimizer = tz.shard(base, torch.optim.SGD(groups, lr=0.1), plan)
        step(model, optimizer, loss_of(model, batch()))
        change(optimizer.param_groups)
        with pytest.raises(tz.Misuse, match="removed or reordered"):
            step(model, optimizer, loss_of(model, batch()))

    on_ranks(2, body)
