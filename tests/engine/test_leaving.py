"""What the user takes away from gathered weights: it must stay what it was when their memory is freed."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine.buckets.parameters.at_rest import AtRest
from tests.engine.toys import (
    Net,
    adamw,
    assert_close,
    assert_equal,
    batch,
    follows_one_process,
    full_parameters,
    loss_of,
    on_ranks,
    plain_loop,
    sharded,
)
from tests.helpers.cover import places


class Positions(nn.Module):
    """Hands out views of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 16 * 13).view(16, 13))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"views": [self.table[: x.shape[1]], self.scale], "seen": self.scale.detach()}


class Leaking(Net):
    """Uses a unit's weights after that unit, and returns some of its own, for a loss and for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.scales: list[Tensor] = []

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x = self.embed(tokens)
        given = self.positions(x)
        for block in self.blocks:
            x = block(x)
        table, scale = given["views"]
        x = self.head(x * scale + table)
        return x * self.temperature, self.temperature, {"scale": given["seen"], "bias": self.head.bias.detach()}


def take_all(model: Any, optimizer: Any, data: Any) -> None:
    """Trains on one output that is a weight, and reads others after backward."""
    for number in range(3):
        logits, temperature, seen = model(data(number))
        ((logits.square().mean() + temperature) * temperature).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.scales.append(seen["scale"] + seen["bias"].sum())


@pytest.mark.parametrize("plan", ["zero3", "shard_grad_op"])
def test_outputs_that_are_views_of_weights_train_and_stay(plan: str) -> None:
    follows_one_process(Leaking(), take_all, plan)


def test_what_evaluation_returned_stays() -> None:
    base = Leaking()

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model, _ = sharded(base, "zero3")
        with torch.no_grad():
            _, temperature, seen = model(torch.zeros(2, 5, dtype=torch.long))
            model(torch.ones(2, 5, dtype=torch.long))
        return temperature, seen

    for temperature, seen in on_ranks(2, body):
        assert temperature == 1.5
        assert_equal(seen, {"scale": base.positions.scale.detach(), "bias": base.head.bias.detach()})


def test_a_state_dict_outlives_the_block_it_was_made_in() -> None:
    base = Net()

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = sharded(base, "zero3")
        with tz.gathered(model):
            state, inner = model.state_dict(), model.blocks[1].state_dict()
        plain_loop(model, optimizer, lambda number: torch.zeros(2, 5, dtype=torch.long))
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return state, inner, torch.load(file)

    for state, inner, read in on_ranks(2, body):
        assert_equal(state, base.state_dict())
        assert_equal(inner, base.blocks[1].state_dict())
        assert_equal(read, base.state_dict())


def test_the_state_dict_of_a_module_whose_weights_are_split_is_refused() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        with pytest.raises(tz.Misuse, match=r"of a module inside .*'blocks\.1\.up\.weight'.*tz\.gathered"):
            model.blocks[1].state_dict()
        assert model.blocks[1].state_dict(keep_vars=True)["up.weight"] is model.blocks[1].up.weight

    on_ranks(2, body)


def test_tied_weights_share_their_copy_and_whole_ones_are_none() -> None:
    base = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    base["b"].weight = base["a"].weight

    def body(rank: int) -> None:
        for plan in ("zero1", "zero3"):
            model, _ = sharded(base, plan)
            with tz.gathered(model):
                state = model.state_dict()
                assert (state["a.weight"].data_ptr() == model["a"].weight.data_ptr()) == (plan == "zero1")
                with torch.no_grad():
                    first = state["a.weight"].clone()
                again = model.state_dict()
            assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
            if plan == "zero3":
                assert again["a.weight"].data_ptr() != state["a.weight"].data_ptr()
            assert torch.equal(first, again["b.weight"])

    on_ranks(2, body)


class ByNumpy(Net):
    """Looks at weights in its forward, from before they are put down until behind their next gather."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(numpy.asarray(self.head.weight.detach()))
        output: Tensor = super().forward(tokens)
        return output


def read_by_numpy(model: Any, optimizer: Any, data: Any) -> None:
    for number in range(3):
        model(data(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and hasattr(model, "_terrazzo"):
            with tz.gathered(model) as parameters:
                model.seen += [each.detach().numpy() for each in parameters.values()]


@pytest.mark.parametrize("plan", ["zero2", "zero3", "shard_grad_op", "zero3@cpu"])
def test_weights_that_numpy_has_read_train_on(plan: str) -> None:
    """It forbids torch to resize their memory."""
    follows_one_process(ByNumpy(), read_by_numpy, plan)


TAKEN: dict[str, Any] = {
    "views": lambda parameter: parameter.detach().view(-1)[1:],
    "numpy": lambda parameter: torch.from_numpy(parameter.detach().numpy()).view(-1)[1:],
    "dlpack": lambda parameter: torch.from_dlpack(parameter.detach()).view(-1)[1:],
}


@pytest.mark.parametrize("taken", TAKEN)
def test_what_is_taken_from_gathered_stays(taken: str) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, optimizer = sharded(base, "zero3")
        with tz.gathered(model) as parameters:
            kept = {name: TAKEN[taken](each) for name, each in parameters.items()}
        model(batch()).square().mean().backward()
        optimizer.step()
        assert_equal(kept, {name: each.detach().view(-1)[1:] for name, each in base.named_parameters()})

    on_ranks(2, body)


@pytest.mark.parametrize("use", [lambda m: m(batch()), lambda m: tz.gathered(m, write=True).__enter__()])
def test_a_write_into_what_was_taken_is_not_lost_in_silence(use: Any) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        with tz.gathered(model, write=True) as parameters:
            taken = parameters["head.weight"].detach()
        taken.zero_()
        with pytest.raises(tz.Misuse, match=r"'head\.weight' written to"), torch.no_grad():
            use(model)

    on_ranks(2, body)


def test_a_graph_from_before_gathered_and_one_from_inside_go_on() -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for number in range(4):
            whole = tz.gathered(model) if hasattr(model, "_terrazzo") else contextlib.nullcontext()
            if number % 2:
                loss = model(data(number)).square().mean()
                with whole:
                    pass
            else:
                with whole:
                    loss = model(data(number)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    follows_one_process(Net(), loop)


# -- what is done inside of gathered -----------------------------------------------------------------------------------


def evaluated(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(batch(1))


def unit_called(model: Any, optimizer: Any) -> None:
    model.blocks[0](torch.ones(1, 13))


def trained(model: Any, optimizer: Any) -> None:
    for number in range(2):
        loss_of(model, batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.25) for name, value in Net().state_dict().items()})


def written(model: Any, optimizer: Any) -> None:
    whole = tz.gathered(model, write=True) if hasattr(model, "_terrazzo") else contextlib.nullcontext()
    with whole, torch.no_grad():
        model.head.weight.fill_(3)


def raised(model: Any, optimizer: Any) -> None:
    if hasattr(model, "_terrazzo"):
        with contextlib.suppress(ZeroDivisionError), tz.gathered(model, write=True):
            model.head.weight.detach().fill_(3)
            raise ZeroDivisionError


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("act", [evaluated, unit_called, trained, loaded, written, raised])
@pytest.mark.parametrize("plan", ["zero3", "shard_grad_op", "hpz", "zero3@cpu"])
def test_weights_stay_readable_in_gathered_whatever_is_done(plan: str, act: Any) -> None:
    """And they and views of them are those of one process, to which the same is done."""
    base = Net()
    alone = copy.deepcopy(base)
    act(alone, adamw(alone.parameters()))
    wanted = {name: each.detach() for name, each in alone.named_parameters()}
    world = 4 if plan == "hpz" else 2

    def body(rank: int) -> None:
        model, optimizer = sharded(base, plan, world)
        with tz.gathered(model) as parameters:
            views = {name: each.detach() for name, each in parameters.items()}
            act(model, optimizer)
            for found in (parameters, views):
                assert_close({name: each.detach().clone() for name, each in found.items()}, wanted, 2e-6)
        assert_close(full_parameters(model), wanted, 2e-6)
        assert type(model.head.weight) is AtRest

    on_ranks(world, body)
