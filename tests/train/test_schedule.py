"""Learning-rate schedules against their definitions written out by hand, and as torch runs them; weight decay."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from terrazzo.config import OptimizerConfig, ScheduleConfig
from terrazzo.errors import BadInput
from terrazzo.train.settings.optimizer import build_optimizer, build_schedule, check_names, learning_rate_share


def shares(config: ScheduleConfig, steps: int) -> list[float]:
    return [learning_rate_share(config, steps, step) for step in range(steps)]


def test_warm_up_is_linear_and_its_first_step_learns() -> None:
    found = shares(ScheduleConfig(name="constant", warmup_steps=4), 6)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_is_half_a_wave_from_the_peak_to_the_final_share() -> None:
    found = shares(ScheduleConfig(name="cosine", final_fraction=0.1), 11)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(11)]
    assert found == pytest.approx(expected, abs=1e-12)


def test_linear_falls_evenly() -> None:
    found = shares(ScheduleConfig(name="linear", final_fraction=0.0), 5)
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_is_flat_until_its_decay() -> None:
    found = shares(ScheduleConfig(name="wsd", warmup_steps=2, decay_steps=3, final_fraction=0.0), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1.0, 0.5, 0.0])
    assert shares(ScheduleConfig(name="wsd"), 10).count(1.0) == 9, "the default decay is a fifth: 1, final"


def test_a_decay_of_one_step_is_the_last() -> None:
    found = shares(ScheduleConfig(name="wsd", decay_steps=1, final_fraction=0.1), 5)
    assert found == pytest.approx([1, 1, 1, 1, 0.1])
    assert shares(ScheduleConfig(name="wsd", final_fraction=0.1), 4)[-1] == pytest.approx(0.1), "a fifth: 1 at least"


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_shares_stay_between_final_and_one(name: str, steps: int) -> None:
    config = ScheduleConfig(name=name, warmup_steps=min(2, steps), final_fraction=0.2)
    assert all(0.2 <= share <= 1.0 for share in shares(config, steps))
    assert learning_rate_share(config, steps, steps + 5) <= 1.0, "training on is defined too"


def test_torch_gives_every_group_its_share() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[0], "lr": 1.0}, {"params": weights[1], "lr": 0.1}])
    schedule = build_schedule(ScheduleConfig(name="linear", final_fraction=0.5), 3, optimizer)
    seen = []
    for _ in range(3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert seen == [pytest.approx(pair) for pair in ([1.0, 0.1], [0.75, 0.075], [0.5, 0.05])]


def test_weight_decay_is_kept_off_what_no_decay_names() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))

    def undecayed(*globs: str, decay: Literal["matrices", "all"] = "matrices") -> list[int]:
        optimizer = build_optimizer(OptimizerConfig(decay=decay, no_decay=list(globs)), model)
        return [
            parameter.ndim
            for group in optimizer.param_groups
            if not group["weight_decay"]
            for parameter in group["params"]
        ]

    assert undecayed() == [1]
    assert undecayed("0.*", "*.bias") == [2, 1]
    assert undecayed(decay="all") == []
    assert undecayed("0.*", decay="all") == [2]
    with pytest.raises(BadInput, match=r"no_decay has '1\.wieght', which no .* Did you mean '1\.weight'\?"):
        check_names(OptimizerConfig(no_decay=["*.bias", "1.wieght"]), [name for name, _ in model.named_parameters()])
