"""DeepSpeed's schedules, against the rates that DeepSpeed 0.19.8's own classes set: recorded, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.errors import BadInput
from terrazzo.integrations.deepspeed.runtime.lr_schedules import SCHEDULES

RECORDED = json.loads((Path(__file__).parent / "data" / "deepspeed_rates.json").read_text())


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5e-3)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["case"])
def test_every_step_has_the_recorded_rate(recorded: dict[str, Any]) -> None:
    optimizer = adamw()
    schedule = SCHEDULES[recorded["class"]](optimizer, **recorded["arguments"])
    rates, betas = [], []
    for _ in recorded["rates"]:
        group = optimizer.param_groups[0]
        rates.append(group["lr"])
        betas.append(group["betas"][0])
        schedule.step()
    assert rates == recorded["rates"]  # to the bit
    assert betas == recorded["betas"]


def test_the_first_groups_rate_is_that_of_all_where_none_is_given() -> None:
    """So `WarmupLR` of DeepSpeed takes it: `[group['lr'] for group in param_groups][0]`."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.01)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = SCHEDULES["WarmupLR"](optimizer, warmup_num_steps=2, warmup_type="linear")
    for _ in range(4):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["case"])
def test_a_restored_schedule_goes_on(recorded: dict[str, Any]) -> None:
    first, second = adamw(), adamw()
    schedule = SCHEDULES[recorded["class"]](first, **recorded["arguments"])
    for _ in range(5):
        schedule.step()
    other = SCHEDULES[recorded["class"]](second, **recorded["arguments"])
    other.load_state_dict(schedule.state_dict())
    for each in (schedule, other):
        each.step()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == recorded["rates"][6]


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0"),
        ("WarmupLR", {"warmup_type": "square"}, "warmup_type"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, "2 values for 1"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "cycle_first_step_size"),
    ],
)
def test_arguments_that_cannot_work_are_refused(name: str, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        SCHEDULES[name](adamw(), **arguments)
