"""Optimizers of a user's own that say they are elementwise: those that are not would train wrong weights, silently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from tests.engine.toys import Net, assert_close, batch, full_parameters, loss_of, on_ranks, step
from tests.helpers.fake import fake_group

PLANS = ["zero0", "zero3", "zero3@cpu", "zero2@cpu"]


class Own(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.update(parameter), alpha=group["lr"])

    def begin(self) -> None:
        pass

    def update(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError


class ByTensor(Own):
    """Momentum in a dict of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.momentum: dict[Tensor, Tensor] = {}

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        self.momentum[parameter] = self.momentum.get(parameter, torch.zeros_like(parameter)) * 0.9 + parameter.grad
        return self.momentum[parameter]


class ByName(ByTensor):
    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        held: Any = self.momentum
        held[id(parameter)] = held.get(id(parameter), 0) * 0.9 + parameter.grad
        return held[id(parameter)]  # type: ignore[no-any-return]


class OnMatrices(Own):
    """Decays what has two dimensions."""

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad + (1e-3 * parameter if parameter.ndim > 1 else 0)


class Trusting(Own):
    """As LAMB and LARS: a rate for each parameter, from norms."""

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad * (parameter.norm() / parameter.grad.norm())


class Centred(Own):
    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad - parameter.grad.mean()


class CountingTensors(Own):
    """Counts in the loop over parameters."""

    count = 0

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        self.count += 1
        return parameter.grad / self.count


class NeverEmpty(Own):
    """As torch's functions for many tensors at once, which want one."""

    def begin(self) -> None:
        torch._foreach_mul([p for group in self.param_groups for p in group["params"]], 1.0)

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad


WRONG = {
    ByTensor: "the weights differ",
    ByName: "the weights differ",
    OnMatrices: "the weights differ",
    Trusting: "the weights differ",
    Centred: "the weights differ",
    CountingTensors: "the weights differ",
    NeverEmpty: "without any, as a rank may have",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lr", [0.05, 1e-6, 0.0])
def test_one_that_is_not_elementwise_is_refused(kind: type[Own], lr: float) -> None:
    with fake_group(2):
        for plan in PLANS:
            model = Net()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with pytest.raises(tz.BadInput, match=f"{kind.__name__} says that it is elementwise.*{WRONG[kind]}"):
                tz.shard(model, kind(model.parameters(), lr), plan)
            assert all(map(torch.equal, model.parameters(), before))
        model, _ = tz.shard(Net(), None, "zero3")
        with pytest.raises(tz.BadInput, match="says that it is elementwise"):
            tz.attach(model, kind(model.parameters(), lr))


def test_each_param_group_is_looked_at() -> None:
    class Chosen(Trusting):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(self.update(p) if group["trust"] else p.grad, alpha=group["lr"])

    with fake_group(1):
        model = Net()
        first, *others = model.parameters()
        groups: Any = [{"params": others, "trust": False}, {"params": [first], "trust": True}]
        with pytest.raises(tz.BadInput, match="Chosen says that it is elementwise"):
            tz.shard(model, Chosen(groups))
        groups[1]["trust"] = False
        tz.shard(model, Chosen([{**group, "params": [*group["params"]]} for group in groups]))


class Noisy(Own):
    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad + torch.randn_like(parameter)


def test_one_that_draws_numbers_is_not_taken_for_wrong_and_leaves_the_generator_alone() -> None:
    with fake_group(2):
        model, before = Net(), torch.get_rng_state()
        tz.shard(model, Noisy(model.parameters()), "zero3")
        assert torch.equal(torch.get_rng_state(), before)


class Anchored(Own):
    """Made its states with the optimizer, as L2-SP does: pulls weights to where they began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(anchor=parameter.detach().clone(), steps=0)

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        kept = self.state[parameter]
        kept["steps"] += 1
        return parameter.grad / kept["steps"] + 0.1 * (parameter - kept["anchor"])


@pytest.mark.parametrize("plan", PLANS)
def test_states_that_were_made_with_the_optimizer_go_on(plan: str) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Anchored(alone.parameters())
    for number in range(3):
        step(alone, optimizer, loss_of(alone, batch(number)))

    def body(rank: int) -> dict[str, Tensor]:
        own = copy.deepcopy(base)
        model, own_optimizer = tz.shard(own, Anchored(own.parameters()), plan)
        for number in range(3):
            step(model, own_optimizer, loss_of(model, batch(number)))
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


class Keeping(Own):
    """Keeps what `kept` makes of a gradient, from the first on."""

    def __init__(self, parameters: Any, kept: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters)
        self.kept = kept

    def update(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        self.state[parameter]["kept"] = self.kept(parameter.grad)
        return parameter.grad


UNKEPT: dict[str, Callable[[Tensor], Any]] = {
    "torch.bool for each element": lambda gradient: gradient > 0,
    "torch.int8 for each element": lambda gradient: gradient.sign().to(torch.int8),
    "a NoneType as state": lambda gradient: None,
    "a str as state": lambda gradient: "sgd",
}


@pytest.mark.parametrize("what", UNKEPT)
def test_states_that_could_not_be_kept_are_refused(what: str) -> None:
    with fake_group(2):
        model = Net()
        with pytest.raises(tz.BadInput, match=f"Keeping keeps {what}.*'kept'"):
            tz.shard(model, Keeping(model.parameters(), UNKEPT[what]))


@pytest.mark.parametrize("kept", [torch.clone, lambda gradient: 1.5, lambda gradient: torch.tensor(3)])
def test_numbers_and_floating_states_are_saved_as_in_one_process(kept: Callable[[Tensor], Any]) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = Keeping(alone.parameters(), kept)
    step(alone, optimizer, loss_of(alone, batch()))
    own = copy.deepcopy(base)
    with fake_group(1):
        model, sharded = tz.shard(own, Keeping(own.parameters(), kept))
        step(model, sharded, loss_of(model, batch()))
        found, wanted = sharded.state_dict()["state"], optimizer.state_dict()["state"]
        assert found.keys() == wanted.keys()
        for key, states in wanted.items():
            torch.testing.assert_close(found[key], states)
