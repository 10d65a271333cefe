"""Backward that comes to a unit by unusual ways, or forwards that return nothing: right, or refused by name."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.toys import (
    EVERY_PLAN,
    Net,
    adamw,
    assert_close,
    batch,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
)
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

SPLIT = ("zero3", "shard_grad_op", "hpz", "hybrid_shard", "hfsdp")


def world_of(plan: str) -> int:
    return 4 if plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz") else 2


class Way(nn.Module):
    """A block with a normalisation and an activation with weights, whose kernels read them without a check."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm, self.up, self.bend = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.PReLU(2 * width)
        self.down = nn.Linear(2 * width, width)
        self.side = nn.Sequential(nn.Linear(width, 3), nn.LayerNorm(3), nn.PReLU())

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(self.bend(self.up(self.norm(x)).flatten(0, 1)).unflatten(0, x.shape[:2]))


class View(Way):
    """Returns a view, which the caller changes in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[..., :13]


class ByList(Way):
    """An auxiliary loss goes into a list that nobody but the loss sees."""

    losses: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(self.side(x).square().mean())
        return self.inner(x)


class Silent(Way):
    """Returns nothing at all; what it computes goes into a list."""

    losses: list[Tensor]

    def forward(self, x: Tensor) -> None:
        self.losses.append(self.inner(x).square().mean())


class Ways(nn.Module):
    def __init__(self, kind: type[Way]) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 13)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(13, 17)
        self.losses: list[Tensor] = []
        for block in self.blocks:
            block.losses = self.losses

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            x = x if y is None else y.mul_(0.5)
        return self.head(x)


def loss_with_all(model: Any, tokens: Tensor) -> Tensor:
    model.losses.clear()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss + sum(model.losses)


def only_the_lists(model: Any, tokens: Tensor) -> Tensor:
    model.losses.clear()
    model(tokens[:, :-1])
    return torch.stack(model.losses).sum()


def build(kind: type[Way]) -> Ways:
    torch.manual_seed(0)
    return Ways(kind)


def fresh(base: Ways) -> Any:
    """A copy whose blocks append to its own list."""
    model = copy.deepcopy(base)
    for block in model.blocks:
        block.losses = model.losses
    return model


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [(View, loss_with_all), (ByList, loss_with_all), (ByList, only_the_lists), (Silent, loss_with_all)],
    ids=["view", "list", "list-alone", "nothing-returned"],
)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_gradients_are_those_of_one_process(plan: str, kind: type[Way], loss: Any) -> None:
    base, world = build(kind), world_of(plan)
    alone = fresh(base)
    optimizer = adamw(alone.parameters())
    for step in range(3):
        for rank in range(world):
            (loss(alone, batch(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model = fresh(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world))
        for step in range(3):
            loss(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for found in on_ranks(world, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)


class Scaled(ByList):
    """Its list comes by an elementwise product, too, whose kernel reads the weight without a look at its memory."""

    def __init__(self, width: int = 13) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses.append((y * self.scale).square().mean())
        return y * self.scale


AWAY = "A gradient came for 'blocks|modified by an inplace operation"


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("kind", [ByList, Scaled])
def test_a_way_that_opens_later_is_refused_and_right_from_then_on(kind: type[Way], prefetch: int) -> None:
    """A step with the usual loss first, and from then on the auxiliary losses alone."""
    base: Any = build(kind)
    only_the_lists(base, batch()).backward()
    base.losses.clear()  # what is not a leaf cannot be copied

    def body(rank: int) -> str:
        model, _ = tz.shard(fresh(base), None, "zero3", prefetch=prefetch)
        loss_of(model, batch()).backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=AWAY) as refused:
            only_the_lists(model, batch()).backward()
        model.zero_grad()
        only_the_lists(model, batch()).backward()
        for bucket in engine_of(model).trainable():
            found = bucket.gradient.finished.read()
            for member, slot in zip(bucket.members, bucket.slots, strict=True):
                wanted = dict(base.named_parameters())[member.name].grad
                part = bucket.space.range(bucket.spec.optim_axes).intersect(slot.range)
                if wanted is not None and part.numel:
                    wanted = wanted.flatten()[part.within(slot.range)]
                    torch.testing.assert_close(found[part.within(bucket.master.range)], wanted)
        return str(refused.value)

    on_ranks(2, body)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_step_before_a_backward_that_nothing_announces(plan: str) -> None:
    """As plain PyTorch does, every plan refuses to read weights of after the step."""
    base, world = build(Scaled), world_of(plan)

    def trained(model: Any, optimizer: Any, rank: int = 0) -> None:
        loss_of(model, batch(0, rank)).backward()
        held = [*model.losses]
        optimizer.step()
        torch.stack(held[-1:]).sum().backward()

    alone = fresh(base)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(alone, adamw(alone.parameters()))

    def body(rank: int) -> None:
        model = fresh(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world))
        with pytest.raises(RuntimeError, match=rf"weights have been changed|{AWAY}"):
            trained(model, optimizer, rank)

    on_ranks(world, body)


def test_a_gradient_for_weights_that_are_away_is_named() -> None:
    """Even where backward has read none of them, which nobody can know."""

    class Biased(Way):
        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(self.side[0].bias.sum())
            return self.inner(x)

    def body(rank: int) -> None:
        model: Any = fresh(build(Biased))
        model, _ = tz.shard(model, None, "zero3")
        loss_of(model, batch()).backward()
        model.zero_grad()
        only_the_lists(model, batch()).backward()

    with pytest.raises(tz.Misuse, match=r"blocks\.[02]\.side\.0\.bias.*unit 'blocks\.[02]'"):
        on_ranks(2, body)


# -- forwards that return nothing, or raise -----------------------------------------------------------------------


class LossAside(Net):
    """As Lightning's validation_step: puts its loss aside and returns None."""

    def forward(self, tokens: Tensor) -> None:
        logits = super().forward(tokens[:, :-1])
        self.loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_model_may_return_none(plan: str) -> None:
    torch.manual_seed(0)
    base, world = LossAside(), world_of(plan)
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for step in range(2):
        for rank in range(world):
            alone(batch(step, rank))
            (alone.loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> tuple[dict[str, Tensor], float]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world))
        for step in range(2):
            model(batch(step, rank))
            model.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch(9))
        return full_parameters(model), model.loss.item()

    alone(batch(9))
    for found, loss in on_ranks(world, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)
        assert loss == pytest.approx(alone.loss.item(), abs=1e-5)


class Echo(Net):
    """Returns leaves, which outlive its forward: a parameter, now and then, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, shift: Tensor, echo: bool) -> Any:
        x = self.embed(tokens) + shift
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.bias if echo else self.bias * 1, shift if echo else shift * 1


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero2@cpu"])
def test_leaves_that_are_returned_and_kept(plan: str) -> None:
    base = Echo()

    def loop(model: Any, optimizer: Any, rank: int | None = None) -> Tensor:
        shift = torch.zeros(base.embed.weight.shape[1], requires_grad=True)
        for number, echo in enumerate((True, True, False, True)):
            losses = []
            for each in [rank] if rank is not None else [0, 1]:
                logits, bias, shifted = model(batch(number, each), shift, echo)
                losses.append((logits * bias).square().mean() + bias.square() + shifted.sum())
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return shift.grad

    alone = copy.deepcopy(base)
    loop(alone, adamw(alone.parameters()))

    def body(rank: int) -> tuple[dict[str, Tensor], int]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
        loop(model, optimizer, rank)
        return full_parameters(model), len(model.bias._backward_hooks)

    for found, hooks in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)
        assert hooks <= 2  # one of this engine's for the last forward, and one that stays


@pytest.mark.parametrize("takes", [torch.autograd.grad, torch.autograd.backward])
def test_gradients_of_frozen_weights_are_refused_by_name(takes: Any) -> None:
    base = Net()
    base.blocks[0].up.weight.requires_grad_(False)
    with fake_group(2):
        model, _ = tz.shard(base, None, "zero3")
        with pytest.raises(tz.Misuse, match=r"gradient of 'blocks\.0\.up\.weight' .* frozen"):
            takes(loss_of(model, batch()), inputs=[model.blocks[0].up.weight])


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_gradients_of_some_weights_alone(plan: str, regions: bool) -> None:
    """`torch.autograd.grad` gives each rank its own, to the bit, and `backward(inputs=...)` their mean."""
    base, world = Regions(regions), world_of(plan)

    def some(model: Any) -> list[nn.Parameter]:
        return [model.blocks[1].up.weight, model.embed.weight, model.unread]

    def taken(model: Any, rank: int) -> list[Tensor]:
        loss = loss_of(model, batch(0, rank))
        first = torch.autograd.grad(loss, some(model)[:1], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, some(model), materialize_grads=True)]

    def body(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = tz.shard(model, optimizer, plan, mesh=mesh_for(plan, world))
        own = taken(model, rank)
        loss_of(model, batch(0, rank)).backward(inputs=some(model)[:2])
        assert [name for name, each in model.named_parameters() if each.grad is not None] == NAMES
        optimizer.step()
        return own, full_parameters(model)

    alone = copy.deepcopy(base)
    for rank in range(world):
        (loss_of(alone, batch(0, rank)) / world).backward(inputs=some(alone)[:2])
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for rank, (own, found) in enumerate(on_ranks(world, body)):
        torch.testing.assert_close(own, taken(base, rank), rtol=0, atol=0)
        assert_close(found, dict(alone.named_parameters()), 1e-6)


NAMES = ["embed.weight", "blocks.1.up.weight"]


class Regions(Net):
    """Perhaps recomputes its blocks, which read a weight of another one; has a weight that no forward reads."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes, self.unread = recomputes, nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = (
                checkpoint(self.with_bias, block, x, use_reentrant=False)
                if self.recomputes
                else self.with_bias(block, x)
            )
        return self.head(x)

    def with_bias(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * self.blocks[0].down.bias.sum()


# -- what cannot be right -----------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_step_between_forward_and_backward_is_named(plan: str) -> None:
    """Plain PyTorch raises here, too: what backward needs was changed in place."""
    world = world_of(plan)

    def body(rank: int) -> None:
        model, optimizer = tz.shard(
            *(lambda net: (net, adamw(net.parameters())))(Net()), plan, mesh=mesh_for(plan, world)
        )
        first = loss_of(model, batch(0, rank))
        loss_of(model, batch(1, rank)).backward()
        optimizer.step()
        first.backward()

    with pytest.raises(tz.Misuse, match=r"unit 'blocks\.2'|the root unit"):
        on_ranks(world, body)


@pytest.mark.parametrize("plan", ["zero3", "hpz", "shard_grad_op"])
def test_a_second_derivative_through_split_weights_is_named(plan: str) -> None:
    world = world_of(plan)

    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, plan, mesh=mesh_for(plan, world))
        loss_of(model, batch(0, rank)).backward(create_graph=True)

    with pytest.raises(tz.Misuse, match=r"create_graph=True.*(unit 'blocks\.2'|the root unit|blocks|head)"):
        on_ranks(world, body)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_a_gradient_penalty_on_inputs_where_weights_are_whole(plan: str) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def penalized(model: Any, rank: int) -> Tensor:
        x = torch.full((3, 5), 0.1 * (rank + 1), requires_grad=True)
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    for _ in range(2):
        for rank in range(2):
            (penalized(alone, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan)
        for _ in range(2):
            penalized(model, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 1e-5)


def test_two_backwards_of_one_forward() -> None:
    torch.manual_seed(0)
    base = Net()
    loss = loss_of(base, batch())
    loss.backward(retain_graph=True)
    loss.backward()

    def body(rank: int, plan: str) -> None:
        model, _ = tz.shard(copy.deepcopy(base), None, plan)
        loss = loss_of(model, batch())
        loss.backward(retain_graph=True)
        loss.backward()
        for bucket in engine_of(model).trainable():
            for index, member in enumerate(bucket.members):
                slot, held = bucket.slots[index], bucket.gradient.finished.sum.data
                part = held.range.intersect(slot.range)
                wanted = dict(base.named_parameters())[member.name].grad.flatten()
                torch.testing.assert_close(held.part(part), wanted[part.start - slot.offset : part.stop - slot.offset])

    for plan in ("zero2", "zero3", "shard_grad_op"):
        on_ranks(2, lambda rank, plan=plan: body(rank, plan))


# -- hooks of others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_hooks_after_accumulation_see_the_gradient(plan: str, when: str) -> None:
    def body(rank: int) -> list[str]:
        model, seen = Net(), []

        def register() -> None:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen.append(name) if p.grad is not None else None
                )

        if when == "before":
            register()
        model, _ = tz.shard(model, None, plan)
        if when == "after":
            register()
        loss_of(model, batch(0, rank)).backward()
        assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
        return seen

    on_ranks(2, body)


def test_hooks_on_saved_tensors_still_work() -> None:
    """Those around the model, in the first forward too, in which the engine watches with hooks of its own."""

    def body(rank: int) -> int:
        model, _ = tz.shard(Net(), None, "zero3")
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, batch(0, rank))
        loss.backward()
        return count

    assert all(count > 5 for count in on_ranks(2, body))


def test_what_was_changed_in_place_is_still_noticed_by_torch() -> None:
    class Careless(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.tanh(self.embed(tokens))
            y = x.square()
            x.add_(1)
            return self.head(y)

    def body(rank: int) -> None:
        model, _ = tz.shard(Careless(), None, "zero3")
        loss_of(model, batch(0, rank)).backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_ranks(2, body)


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    """Operations that keep their own output among them: a hook that holds it would hold the operation, for ever."""

    class Squashed(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.sigmoid(super().forward(tokens))

    def body(rank: int) -> None:
        model, _ = tz.shard(Squashed(), None, "zero3")
        gc.collect()
        kept = []
        for _ in range(3):
            output = model(batch(0, rank)[:, :-1])
            kept.append(weakref.ref(output))
            del output
        assert [ref() for ref in kept] == [None] * 3

    on_ranks(2, body)


def test_hooks_on_saved_tensors_may_differ_between_forwards() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, "zero3")
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda kept: kept[0]):
            first = loss_of(model, batch(0, rank))
        second = loss_of(model, batch(1, rank))
        (first + second).backward()

    on_ranks(2, body)
