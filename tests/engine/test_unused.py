"""Parameters without a gradient on some ranks count as zero; without one on all ranks they are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import ModelState
from tests.engine.toys import (
    EVERY_PLAN,
    Block,
    Net,
    adamw,
    assert_close,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    on_ranks,
    sharded,
    train,
)
from tests.helpers.cover import places


class Gated(Net):
    """`use` says which blocks run; the others get no gradient."""

    use: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.use:
            x = self.blocks[index](x)
        return self.head(x)


class Choosy(Block):
    """A block that leaves out the parts named in `skip`."""

    skip: tuple[str, ...] = ()

    def __init__(self, width: int = 5) -> None:
        super().__init__(width)
        self.first = nn.Parameter(torch.randn(width))
        self.table = nn.Parameter(torch.randn(90, width))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if "first" not in self.skip:
            x = x * self.first
        if "mlp" not in self.skip:
            x = super().forward(x)
        if "table" not in self.skip:
            x = x + self.table.mean(0)
        return x if "last" in self.skip else self.last(x)


class ChoosyNet(Net):
    def __init__(self) -> None:
        super().__init__(5, 0)
        self.blocks.extend(Choosy(5) for _ in range(2))

    def skip(self, *names: str) -> None:
        for block in self.blocks:
            block.skip = names


def states(model: nn.Module) -> dict[tuple[str, str, int], Tensor]:
    """This rank's pieces."""
    return {(piece.name, piece.kind, piece.start): piece.tensor.clone() for piece in ModelState(model).pieces()}


def assemble(ranks: list[dict[tuple[str, str, int], Tensor]]) -> dict[tuple[str, str], Tensor]:
    """Flat states by name and kind, put together from every rank's pieces."""
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for pieces in ranks:
        for (name, kind, start), tensor in pieces.items():
            parts.setdefault((name, kind), {})[start] = tensor
    return {key: torch.cat([part for _, part in sorted(found.items())]) for key, found in parts.items()}


def states_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name, "weight"] = parameter.detach().reshape(-1)
        for kind, value in optimizer.state[parameter].items():
            found[name, kind] = value.detach().reshape(-1)
    return found


SCHEDULES: dict[str, list[tuple[str, ...]]] = {
    "first always": [("first",)] * 3,
    "table always": [("table",)] * 3,
    "last always": [("last",)] * 3,
    "mlp always": [("mlp",)] * 3,
    "several": [("first", "table", "last")] * 3,
    "in turn": [("first",), ("table", "mlp"), (), ("last",), ("first", "mlp", "table")],
    "from the second step on": [(), ("table",), ("table",), ("first",)],
    "in the first step": [("first", "last"), (), ()],
}


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "hybrid_shard", "hfsdp", "hpz"])
def test_parameters_out_of_use_on_all_ranks_are_left_alone(plan: str, schedule: str) -> None:
    """Weights, moments and step counts, each exactly as in one process."""
    base = ChoosyNet()
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for step, skip in enumerate(SCHEDULES[schedule]):
        alone.skip(*skip)
        torch.stack([loss_of(alone, batch(step, rank)) for rank in range(4)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[tuple[str, str, int], Tensor]:
        model, optimizer = sharded(base, plan, 4)
        for step, skip in enumerate(SCHEDULES[schedule]):
            model.skip(*skip)
            train(model, optimizer, 1, rank, first=step)
        return states(model)

    wanted, found = states_alone(alone, optimizer), assemble(on_ranks(4, body))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key[1] == "step":
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_units_skipped_on_some_ranks_only(plan: str) -> None:
    """Each rank routes its data through other blocks; a missing gradient counts as zero."""
    base = Gated(depth=3)
    routes = [[(0, 1, 2), (1,), (0, 2), (2,)], [(0,), (0, 1), (0,), (0, 1, 2)], [(1, 2), (1, 2), (1, 2), (2,)]]
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for step, uses in enumerate(routes):
        losses = []
        for rank, use in enumerate(uses):
            alone.use = use
            losses.append(loss_of(alone, batch(step, rank)))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan, 4)
        for step, uses in enumerate(routes):
            model.use = uses[rank]
            train(model, optimizer, 1, rank, first=step)
        return full_parameters(model)

    for found in on_ranks(4, body):
        assert_close(found, dict(alone.named_parameters()), 5e-6)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hpz"])
def test_ranks_that_run_different_units_in_evaluation(plan: str) -> None:
    base = Gated()

    def body(rank: int) -> float:
        model, _optimizer = sharded(base, plan, 4)
        model.use = ((0,), (1, 2), (), (0, 2))[rank]
        with torch.no_grad():
            return loss_of(model, batch()).item()

    for use, loss in zip(((0,), (1, 2), (), (0, 2)), on_ranks(4, body), strict=True):
        base.use = use
        assert loss == loss_of(base, batch()).item()


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_a_unit_used_only_in_an_earlier_micro_batch_is_updated(plan: str) -> None:
    base = Gated()
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for step in range(2):
        for micro, use in enumerate(((0, 1, 2), (0,))):
            alone.use = use
            torch.stack([loss_of(alone, batch(10 * step + micro, rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan)
        for step in range(2):
            model.use = (0, 1, 2)
            with tz.accumulate(model):
                loss_of(model, batch(10 * step, rank)).backward()
            model.use = (0,)
            loss_of(model, batch(10 * step + 1, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_a_step_without_gradients_changes_nothing(plan: str) -> None:
    base = Net()

    def body(rank: int) -> tuple[dict[str, Tensor], list[str]]:
        model, optimizer = sharded(base, plan)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        return full_parameters(model), [piece.kind for piece in ModelState(model).pieces()]

    for parameters, kinds in on_ranks(2, body):
        assert_equal(parameters, dict(base.named_parameters()))
        assert set(kinds) <= {"weight"}


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("by_model", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool, by_model: bool) -> None:
    """Zeros are stepped on, which moves momentum and step counts; None is not."""
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for step in range(3):
        torch.stack([loss_of(alone, batch(step, rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        (alone if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        optimizer.step()

    def body(rank: int) -> dict[tuple[str, str, int], Tensor]:
        model, optimizer = sharded(base, "zero3")
        for step in range(3):
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
            optimizer.step()
        return states(model)

    wanted, found = states_alone(alone, optimizer), assemble(on_ranks(2, body))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_an_unused_root_parameter_and_an_unused_unit() -> None:
    base = Gated()
    base.lonely = nn.Parameter(torch.ones(3))
    base.use = (0, 1)
    start = {name: p.detach().clone() for name, p in base.named_parameters()}

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3")
        train(model, optimizer, 2, rank)
        return full_parameters(model)

    for found in on_ranks(2, body):
        changed = {name for name, value in found.items() if not torch.equal(value, start[name])}
        assert changed == {name for name in start if "blocks.2" not in name and name != "lonely"}
