"""What a model does to values between two modules of a pipeline's line, in place too, is what one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from tests.helpers.threads import run_in_threads


class Between(nn.Module):
    """Four layers, and something between two of them."""

    def __init__(self, does: Callable[[Tensor], Tensor | None], behind: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.does, self.behind = does, behind

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.behind:
                changed = self.does(x)
                x = x if changed is None else changed
        return x


def masked(x: Tensor) -> None:
    x[:, :2] = 0


def scaled(x: Tensor) -> Tensor:
    x *= 3
    return x


def shifted(x: Tensor) -> Tensor:
    x += torch.arange(4.0)
    return x


IN_PLACE = {
    "mul_": lambda x: x.mul_(3.0),
    "relu_": torch.relu_,
    "inplace=True": lambda x: F.relu(x, inplace=True),
    "a mask": masked,
    "*=": scaled,
    "+= a tensor": shifted,
}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)) for _ in range(3)]


def plain(model: nn.Module, trains: bool) -> tuple[Tensor, dict[str, Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(())
    with torch.set_grad_enabled(trains):
        for x, y in batches():
            loss = loss_of(model(x), y)
            losses += loss.detach()
            if trains:
                loss.backward()
    optimizer.step()
    return losses, model.state_dict()


def in_stages(base: nn.Module, first_of_second: int, trains: bool, within: Any = None) -> list[tuple[Tensor, Any]]:
    def body(rank: int) -> tuple[Tensor, Any]:
        model, mesh = copy.deepcopy(base), tz.mesh(pp=2, device="cpu")
        pipeline = tz.Pipeline(line=["layers.*"], split=[f"layers.{first_of_second}"])
        tz.parallelize(model, mesh, pipeline=pipeline)
        model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.01), "zero2", mesh=mesh)
        with within() if within else torch.set_grad_enabled(trains):
            loss = tz.step(model, batches(), loss_of)
        if trains:
            optimizer.step()
        return loss, tz.full_state_dict(model)

    return run_in_threads(2, body, timeout_s=10.0)


def check(base: nn.Module, first_of_second: int, trains: bool) -> None:
    found = in_stages(base, first_of_second, trains)
    loss, states = plain(base, trains)
    for each, _ in found:
        assert torch.equal(each, loss)
    for name, each in states.items():
        assert torch.equal(found[0][1][name], each)


@pytest.mark.cover
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("first_of_second", [1, 3])
@pytest.mark.parametrize("does", IN_PLACE)
def test_changes_in_place_inside_of_a_stage(does: str, first_of_second: int, trains: bool) -> None:
    """They come neither into what the stage before sends, nor does the one behind refuse them."""
    for behind in {0, 1, 2} - {first_of_second - 1}:
        check(Between(IN_PLACE[does], behind), first_of_second, trains)


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("does", IN_PLACE)
def test_changes_in_place_between_two_stages_are_refused(does: str, within: Any) -> None:
    """Under inference_mode too, where torch counts no changes of what is made there."""
    with pytest.raises(tz.BadInput, match=r"changes what 'layers\.1' returns before it gives it to 'layers\.2'"):
        in_stages(Between(IN_PLACE[does], 1), 2, False, within)


def test_changes_in_place_inside_of_a_stage_under_inference_mode() -> None:
    base = Between(torch.relu_, 2)
    for loss, _ in in_stages(base, 2, False, torch.inference_mode):
        assert torch.equal(loss, plain(base, trains=False)[0])


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_stage_may_begin_with_a_change_in_place(schedule: str) -> None:
    """As it does where stages are balanced: a module without matrices costs nothing."""
    torch.manual_seed(0)
    base = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(4, 4), nn.ReLU(inplace=True))))

    def body(rank: int) -> tuple[Tensor, Any]:
        model, mesh = copy.deepcopy(base), tz.mesh(pp=2, device="cpu")
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule, split=["3"]))
        model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.01), "zero2", mesh=mesh)
        loss = tz.step(model, batches(), loss_of)
        optimizer.step()
        return loss, tz.full_state_dict(model)

    found = run_in_threads(2, body, timeout_s=10.0)
    loss, states = plain(base, trains=True)
    assert all(torch.equal(each, loss) for each, _ in found)
    assert all(torch.equal(found[0][1][name], each) for name, each in states.items())


def test_what_is_done_in_a_later_stage_is_not_done_in_an_earlier_one() -> None:
    """Whatever it needs there: values of its own, or another shape."""
    seen: list[int] = []

    def does(x: Tensor) -> Tensor:
        seen.append(1)
        return x.flip(0) + torch.arange(4.0)

    check(Between(does, 2), 2, True)
    assert len(seen) == 3 + 3


def test_a_change_in_place_of_this_stages_values_by_those_of_another_is_refused() -> None:
    """It would be lost here: what an earlier stage has kept is nothing to compute with."""

    class Skips(Between):
        def forward(self, x: Tensor) -> Tensor:
            kept = self.layers[0](x)
            x = self.layers[2](self.layers[1](kept))
            return self.layers[3](x.add_(kept))

    with pytest.raises(
        tz.Misuse, match=r"add_.* was called on what 'layers\.0' returns, which a stage before has kept"
    ):
        in_stages(Skips(masked, 9), 2, True)
