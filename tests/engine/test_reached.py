"""Weights that are used outside of their own unit's forward: by a sibling, by the model, by another method."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.toys import (
    Block,
    Net,
    batch,
    follows_one_process,
    loss_of,
    on_ranks,
    plain_loop,
    sharded,
    step,
    unpickled,
    without_collector,
)

Uses = Callable[["Odd", Tensor], Tensor]


class Odd(Net):
    """What it does between embedding and head is given."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.uses(self, self.embed(tokens)))

    def encode(self, tokens: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.embed(tokens))).mean()


def unrolled(net: Odd, x: Tensor) -> Tensor:
    """No block runs a forward of its own."""
    for block in net.blocks:
        x = x + block.down(torch.relu(block.up(x)))
    return x


def by_a_sibling(net: Odd, x: Tensor) -> Tensor:
    """Before its own forward and after it."""
    x = F.linear(F.linear(x, net.blocks[1].up.weight), net.blocks[1].up.weight.t())
    x = net.blocks[1](net.blocks[0](x))
    return net.blocks[2](x) + F.linear(x, net.blocks[0].down.weight.t())[..., :13]


def penalised(net: Odd, x: Tensor) -> Tensor:
    """A norm inside forward has its gradient."""
    for block in net.blocks:
        x = block(x)
    return x * (1 + net.blocks[0].up.weight.norm())


def recomputed(net: Odd, x: Tensor) -> Tensor:
    return checkpoint(lambda y: by_a_sibling(net, y), x, use_reentrant=False)


def only_here(net: Odd, x: Tensor) -> Tensor:
    """What is reached depends on the data of a rank."""
    x = net.blocks[2](net.blocks[0](x))
    taken = x.detach()[:, :1, :1] > 0
    return torch.where(taken, x + net.blocks[1].down(net.blocks[1].up(x)), x) if taken.any() else x


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero2", "zero3", "shard_grad_op", "hpz", "zero3@cpu"])
@pytest.mark.parametrize("uses", [unrolled, by_a_sibling, penalised, recomputed, only_here])
def test_they_are_gathered_as_they_are_reached(uses: Uses, plan: str) -> None:
    follows_one_process(Odd(uses), plain_loop, plan, 4 if plan == "hpz" else 2)


def looked_at(net: Odd, x: Tensor) -> Tensor:
    """A weight is read without a gradient, outside of its unit's forward."""
    with torch.no_grad():
        net.blocks[2].up.weight.sum()
    return in_turn(net, x)


def in_turn(net: Odd, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def test_a_weight_that_is_only_read_makes_no_step_stray() -> None:
    bases = [Odd(looked_at), Odd(in_turn)]

    def body(rank: int) -> list[int]:
        sums = []
        for base in bases:
            model, optimizer = sharded(base, "zero3")
            for _ in range(3):
                step(model, optimizer, loss_of(model, batch()))
            sums.append(engine_of(model).traffic.count["reduce_scatter"])
        return sums

    for read, plain in on_ranks(2, body):
        assert read == plain > 0


def test_evaluation_gathers_them_and_gives_them_back() -> None:
    base = Odd(unrolled)

    def body(rank: int) -> None:
        model, optimizer = sharded(base, "zero3")
        for _ in range(2):
            with torch.no_grad():
                assert torch.allclose(model(batch()), copy.deepcopy(base)(batch()))
            with pytest.raises(tz.Misuse, match=r"tz\.register_forward_method\(model, 'name'\)"):
                model.blocks[1].up(torch.ones(13))
        step(model, optimizer, loss_of(model, batch()))
        with pytest.raises(tz.Misuse, match=r"blocks\.1\.up\.weight"):
            model.blocks[1].up.weight.tolist()

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero1", "zero3", "hpz"])
def test_a_registered_method_trains_as_forward_does(plan: str) -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        if not isinstance(optimizer, torch.optim.AdamW) or hasattr(model, "_terrazzo"):
            tz.register_forward_method(model, "encode")
        for number in range(4):
            step(model, optimizer, model.encode(data(number)) if number % 2 else loss_of(model, data(number)))

    follows_one_process(Odd(unrolled), loop, plan, 4 if plan == "hpz" else 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode", "no method 'decode'"),
        ("weight", "no method 'weight'"),
        ("forward", r"model\(\.\.\.\).*Remove this line"),
    ],
)
def test_a_method_that_cannot_be_registered(name: str, words: str) -> None:
    with pytest.raises(tz.BadInput, match=words):
        tz.register_forward_method(nn.Linear(1, 1), name)


def test_a_method_of_a_module_whose_weights_are_gathered_with_others_is_refused_at_once() -> None:
    """Units, and what has units alone, have theirs."""

    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        for module in (model, model.blocks, model.blocks[0]):
            tz.register_forward_method(module, "extra_repr")
        with pytest.raises(tz.BadInput, match=r"Linear is no unit .*'blocks\.0\.up\.weight' is gathered with what"):
            tz.register_forward_method(model.blocks[0].up, "extra_repr")

    on_ranks(2, body)


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_deep_copy_registers_a_method_of_its_own() -> None:
    encoder = Encoder(3, 3)
    tz.register_forward_method(encoder, "encode")
    twin = copy.deepcopy(encoder)
    with torch.no_grad():
        twin.weight.zero_()
    assert not twin.encode(torch.ones(3)).any() and encoder.encode(torch.ones(3)).any()


def test_a_module_with_a_registered_method_is_freed_at_once() -> None:
    encoder = Encoder(3, 3)
    tz.register_forward_method(encoder, "encode")
    encoder = unpickled(encoder)
    encoder.encode(torch.ones(3))
    gone = weakref.ref(encoder)
    with without_collector():
        del encoder
        assert gone() is None


def test_a_method_that_is_registered_twice_runs_hooks_once() -> None:
    encoder, calls = Encoder(3, 3), []
    encoder.register_forward_pre_hook(lambda module, args: calls.append(module))
    for _ in range(2):
        tz.register_forward_method(encoder, "encode")
    encoder.encode(torch.ones(3))
    assert calls == [encoder]


def test_a_penalty_outside_of_forward_is_not_lost_in_silence() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        penalty = model.blocks[0].up.weight.norm()
        assert penalty.item() > 0 and not model.blocks[0].up.weight.detach().norm().requires_grad
        assert not (model.blocks[0].up.weight == 0).float().mean().requires_grad
        with pytest.raises(tz.Misuse, match=r"blocks\.0\.up\.weight.*weight_decay"):
            (loss_of(model, batch()) + penalty).backward()

    on_ranks(2, body)


class Mapped(nn.Module):
    """One block is called on each element of the batch, by a transform that hides its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(13, 2)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.func.vmap(self.blocks[1])(self.blocks[0](x))
        return self.head(mapped)


def test_a_unit_in_a_transform_trains_with_whole_weights_and_is_told_of_else() -> None:
    base, x = Mapped(), torch.randn(4, 3, 13)
    base(x).square().mean().backward()

    def body(rank: int) -> None:
        model, _ = tz.shard(copy.deepcopy(base), None, "zero2", units=[Block])
        model(x).square().mean().backward()
        torch.testing.assert_close(model.blocks[1].up.weight.grad.norm(), base.blocks[1].up.weight.grad.norm())
        split, _ = tz.shard(copy.deepcopy(base), None, "zero3", units=[Block])
        with pytest.raises(tz.Misuse, match=r"torch\.func\.vmap.*on the whole batch.*zero2"):
            split(x).square().mean().backward()

    on_ranks(2, body)
