"""tz.optim.Lion and AdEMAMix: their papers' formulas, in fp64, on whole parameters; and the same bits under plans."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.errors import BadInput
from tests.engine.toys import Net, assert_close, assert_equal, batch, full_parameters, loss_of, on_ranks, step

LR, DECAY = 0.01, 0.1


def lion(t: int, weight: Tensor, gradient: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Chen et al., algorithm 2."""
    mean = kept.get("m", torch.zeros_like(weight))
    update = torch.sign(0.9 * mean + 0.1 * gradient)
    kept["m"] = 0.99 * mean + 0.01 * gradient
    return weight - LR * (update + DECAY * weight)


def ademamix(t: int, weight: Tensor, gradient: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Pagliardini et al., algorithm 1, with a warm-up of 3 steps."""
    first, second, third = 0.9, 0.999, 0.9999
    share = min(1.0, t / 3)
    alpha = 5 * share
    log1, log3 = math.log(first), math.log(third)
    third = min(math.exp(log1 * log3 / ((1 - share) * log3 + share * log1)), third)
    zeros = torch.zeros_like(weight)
    kept["m1"] = first * kept.get("m1", zeros) + (1 - first) * gradient
    kept["m2"] = third * kept.get("m2", zeros) + (1 - third) * gradient
    kept["v"] = second * kept.get("v", zeros) + (1 - second) * gradient**2
    fast, squares = kept["m1"] / (1 - first**t), kept["v"] / (1 - second**t)
    return weight - LR * ((fast + alpha * kept["m2"]) / (squares.sqrt() + 1e-8) + DECAY * weight)


Formula = Callable[[int, Tensor, Tensor, dict[str, Tensor]], Tensor]
CASES: list[tuple[Callable[..., Any], Formula, dict[str, Any]]] = [
    (tz.optim.Lion, lion, {}),
    (tz.optim.AdEMAMix, ademamix, {"warmup_steps": 3}),
]


@pytest.mark.parametrize(("make", "formula", "options"), CASES, ids=["Lion", "AdEMAMix"])
def test_it_is_the_papers_on_whole_parameters_and_itself_under_plans(
    make: Callable[..., Any], formula: Formula, options: dict[str, Any]
) -> None:
    settings = {"lr": LR, "weight_decay": DECAY, **options}
    base = Net().double()
    alone, kept = copy.deepcopy(base), {name: dict[str, Tensor]() for name, _ in base.named_parameters()}
    optimizer = make(alone.parameters(), **settings)
    plain = {name: p.detach().clone() for name, p in alone.named_parameters()}
    for t in range(1, 6):
        loss_of(alone, batch(t)).backward()
        for name, p in alone.named_parameters():
            assert p.grad is not None
            plain[name] = formula(t, plain[name], p.grad, kept[name])
        optimizer.step()
        optimizer.zero_grad()
        assert_close(dict(alone.named_parameters()), plain, 1e-5)  # losses are in fp32

    single, whole = Net(), {}
    own = copy.deepcopy(single)
    stepped = make(own.parameters(), **settings)
    for t in range(4):
        step(own, stepped, loss_of(own, batch(t)))
    whole = {name: p.detach().clone() for name, p in own.named_parameters()}

    def body(plan: str) -> dict[str, Tensor]:
        mine = copy.deepcopy(single)
        model, sharded = tz.shard(mine, make(mine.parameters(), **settings), plan)
        for t in range(4):
            step(model, sharded, loss_of(model, batch(t)))
        return full_parameters(model)

    for plan in ("zero3", "zero1@cpu"):
        for found in on_ranks(2, lambda rank, plan=plan: body(plan)):
            assert_equal(found, whole)


def test_settings_are_refused() -> None:
    for make, options, words in (
        (tz.optim.Lion, {"lr": -1.0}, "Lion: lr is -1.0; give 0 or more"),
        (tz.optim.AdEMAMix, {"betas": (0.9, 0.99, 1.0)}, "AdEMAMix: betas is"),
        (tz.optim.AdEMAMix, {"betas": (0.9, 0.99)}, "AdEMAMix: betas is .* give 3"),
        (tz.optim.Lion, {"betas": 0.9}, "Lion: betas is 0.9; give 2"),
        (tz.optim.Lion, {"betas": ("0.9", 0.99)}, "Lion: betas is .* give 2"),
        (tz.optim.Lion, {"lr": "1e-3"}, "Lion: lr is '1e-3'; give 0 or more"),
        (tz.optim.Lion, {"lr": math.inf}, "Lion: lr is inf; give 0 or more"),
        (tz.optim.AdEMAMix, {"warmup_steps": 2.5}, r"warmup_steps is 2\.5; give a whole number"),
    ):
        with pytest.raises(BadInput, match=words):
            make(Net().parameters(), **options)  # type: ignore[operator]
        with pytest.raises(BadInput, match=words):
            make([{"params": Net().parameters(), **options}])  # type: ignore[operator]


EACH = [tz.optim.Lion, tz.optim.AdEMAMix, lambda given: tz.optim.Muon([p for p in given if p.ndim > 1])]


@pytest.mark.parametrize("make", [tz.optim.Lion, tz.optim.AdEMAMix, tz.optim.Muon])
def test_what_are_no_parameters_is_refused_as_torch_does(make: Callable[..., Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for given in ([1], {"a": weight}, [{"params": {weight}}]):
        with pytest.raises(TypeError) as theirs:
            torch.optim.SGD(given)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=re.escape(str(theirs.value))):
            make(given)


@pytest.mark.parametrize("make", EACH, ids=["Lion", "AdEMAMix", "Muon"])
def test_complex_parameters_are_refused_and_not_stepped_by_half(make: Callable[..., Any]) -> None:
    real, twisted = (torch.nn.Linear(2, 2, dtype=dtype) for dtype in (torch.float32, torch.complex64))
    with pytest.raises(BadInput, match=r"given a parameter of torch\.complex64, and steps real numbers.*view_as_real"):
        make(twisted.parameters())
    optimizer = make(real.parameters())
    for params in (twisted.weight, iter([twisted.weight])):
        with pytest.raises(BadInput, match="real numbers"):
            optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("make", EACH, ids=["Lion", "AdEMAMix", "Muon"])
def test_sparse_gradients_are_refused_before_anything_is_changed(make: Callable[..., Any]) -> None:
    table, other = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 3)
    before = other.weight.detach().clone()
    optimizer = make([*other.parameters(), *table.parameters()])
    other(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(BadInput, match=r"was given a sparse gradient.*sparse=False"):
        optimizer.step()
    assert torch.equal(other.weight, before)
