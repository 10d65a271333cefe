"""Ranks of all stages are given the same step, or none of them begins to work on it."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import terrazzo as tz
from tests.helpers.threads import run_in_threads


def sharded():
    mesh, model = tz.mesh(pp=2, device="cpu"), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    tz.parallelize(model, mesh, pipeline=tz.Pipeline())
    return tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), "zero3", mesh=mesh)


def with_inputs(inputs: object, count: int = 2) -> dict[str, Any]:
    return {"micro_batches": [*[(torch.ones(2, 4), torch.ones(2, 4))] * (count - 1), (inputs, torch.ones(2, 4))]}


@pytest.mark.parametrize(
    ("apart", "message"),
    [
        (with_inputs(torch.ones(2, 4), count=3), r"2 to 3 micro-batches \(here 3\)"),
        ({"denominator": 2.0}, r"denominators from 1 to 2 \(here 2\)"),
        ({"auxiliary": lambda module: None}, "'auxiliary' on some and none on others"),
        (with_inputs(torch.ones(3, 4)), r"another form for micro-batch 2 of 2 \(here float32 \[3, 4\]\)"),
        (with_inputs(torch.ones(2, 4, dtype=torch.float64)), r"another form .* \(here float64 \[2, 4\]\)"),
        (with_inputs({"input": torch.ones(2, 4)}), "another form for micro-batch 2"),
        (with_inputs(UserDict(input=torch.ones(2, 4))), "another form for micro-batch 2"),
        (with_inputs((torch.ones(2, 4), True)), r"another form .* float32 \[2, 4\], True\)"),
        (with_inputs(torch.ones(2, 4).triu()), "other values for micro-batch 2"),
    ],
)
def test_what_ranks_of_other_stages_were_not_given(apart: dict[str, Any], message: str):
    """Every rank says so, in a step after the first too, before it computes anything; then all may go on."""
    alike = {**with_inputs(torch.ones(2, 4)), "denominator": 1.0}

    def body(rank: int) -> tuple[float, float]:
        model, optimizer = sharded()
        before = tz.step(model, loss_fn=F.mse_loss, **alike)
        optimizer.zero_grad()
        runs: list[Any] = []
        model[-1].register_forward_hook(lambda *_: runs.append(1))
        with pytest.raises(tz.RanksApart, match=message if rank else "have not been told the same"):
            tz.step(model, loss_fn=F.mse_loss, **alike | (apart if rank else {}))
        assert not runs
        return before.item(), tz.step(model, loss_fn=F.mse_loss, **alike).item()

    for before, after in run_in_threads(2, body, timeout_s=10.0):
        assert before == after


def test_what_one_rank_refuses_of_a_step_is_raised_on_those_of_other_stages():
    def body(rank: int) -> str:
        model, _ = sharded()
        batch = torch.ones(2, 4), torch.ones(2, 4)
        with pytest.raises((tz.BadInput, tz.RanksApart)) as raised:
            tz.step(model, [] if rank else [batch] * 2, F.mse_loss)
        return f"{type(raised.value).__name__}: {raised.value}"

    others, own = run_in_threads(2, body, timeout_s=10.0)
    assert own.startswith("BadInput: tz.step was given []")
    assert others.startswith("BadInput: Rank 1 has failed first: tz.step was given []")


def test_rows_given_by_name_in_a_mapping_of_ones_own_are_told_apart():
    """Shapes of messages are remembered by the form of what is inside."""

    def body(rank: int) -> float:
        model, _ = sharded()
        for rows in (2, 3):
            batch = UserDict(input=torch.ones(rows, 4)), torch.ones(rows, 4)
            loss = tz.step(model, [batch] * 2, F.mse_loss)
        return loss.item()

    first, second = run_in_threads(2, body, timeout_s=10.0)
    assert first == second


@pytest.mark.parametrize("stage", [0, 1])
def test_what_differs_in_one_stage_is_refused_in_all(stage: int) -> None:
    """Else the others would wait for those that have raised."""

    def body(rank: int) -> str:
        mesh = tz.mesh(pp=2, dp_shard=2, device="cpu")
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        own = [parameter for parameter in model.parameters() if not parameter.is_meta]
        own[0].requires_grad_(rank != 2 * stage)
        with pytest.raises(tz.BadInput, match="told different things") as raised:
            tz.shard(model, None, "zero3", mesh=mesh)
        return str(raised.value)

    said = run_in_threads(4, body, timeout_s=10.0)
    assert ["another stage" in text for text in said] == [rank // 2 != stage for rank in range(4)]
