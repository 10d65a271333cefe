"""Several optimizers over disjoint parameters of one model, and optimizers that were never attached to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import terrazzo as tz
from terrazzo.engine import ModelState, engine_of
from terrazzo.engine.optim.stock.stepper import Stepper
from tests.engine.toys import (
    Block,
    Net,
    adamw,
    assert_close,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
    without_collector,
)
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group

WIDTH = 8


class Gan(nn.Module):
    """A generator and a discriminator in one model; `gain` of the generator lies in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 13), Block(), nn.Linear(13, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 13), Block(), nn.Linear(13, 1))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, part: str, x: Tensor) -> Tensor:
        return self.generator(x) * self.gain if part == "generate" else self.discriminator(x)

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [self.gain, *self.generator.parameters()], list(self.discriminator.parameters())


def two(model: Gan) -> list[Optimizer]:
    generated, judged = model.parts()
    return [
        AdamW([{"params": generated[:3]}, {"params": generated[3:], "weight_decay": 0.3}], lr=1e-2),
        SGD(judged, lr=0.05, momentum=0.9),
    ]


def noise(step: int, ranks: Sequence[int], width: int) -> Tensor:
    return torch.cat([torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + r)) for r in ranks])


def play(model: Any, optimizers: Sequence[Any], ranks: Sequence[int], steps: int = 4, first: int = 0) -> list[float]:
    """The usual game: the judge's step on real and fake, then the generator's through the judge."""
    by_generator, by_judge = optimizers
    norms = []
    for step in range(first, first + steps):
        by_judge.zero_grad()
        real = model("judge", noise(100 + step, ranks, WIDTH))
        F.binary_cross_entropy_with_logits(real, torch.ones_like(real)).backward()
        fake = model("generate", noise(step, ranks, 3))
        judged = model("judge", fake.detach())
        F.binary_cross_entropy_with_logits(judged, torch.zeros_like(judged)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.1).item())
        by_judge.step()
        by_generator.zero_grad()
        judged = model("judge", model("generate", noise(step, ranks, 3)))
        F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)).backward()
        by_generator.step()
    return norms


def sharded_gan(base: Gan, plan: str, world_size: int, later: bool = False, **options: Any) -> tuple[Any, Any]:
    """Both optimizers given to `tz.shard`, or attached after it."""
    model = copy.deepcopy(base)
    options |= {"mesh": mesh_for(plan, world_size), "units": [Block]}
    if later:
        tz.shard(model, None, plan, **options)
        return model, [tz.attach(model, each) for each in two(model)]
    return tz.shard(model, two(model), plan, **options)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_on_one_rank_each_bit_is_that_of_plain_torch(plan: str, later: bool) -> None:
    base = Gan()
    alone = copy.deepcopy(base)
    wanted = play(alone, two(alone), [0])

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizers = sharded_gan(base, plan, 1, later)
        assert isinstance(optimizers, list)
        return play(model, optimizers, [0]), full_parameters(model)

    norms, found = on_ranks(1, body)[0]
    assert_equal(found, dict(alone.named_parameters()))
    assert norms == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "later"),
    mostly_long(
        [("zero0", True), ("zero1", False), ("zero1", True), ("zero2", False), ("zero3", True), ("hpz", False)],
        *[("zero1", False), ("zero3", True), ("hpz", False)],
    ),
)
def test_on_several_ranks_it_is_one_process(plan: str, later: bool) -> None:
    base = Gan()
    alone = copy.deepcopy(base)
    play(alone, two(alone), [0, 1, 2, 3])

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizers = sharded_gan(base, plan, 4, later)
        play(model, optimizers, [rank])
        return full_parameters(model)

    for found in on_ranks(4, body):
        assert_close(found, dict(alone.named_parameters()), 3e-6)


def test_tensors_stepped_one_by_one_find_their_param_group_among_those_of_all_optimizers() -> None:
    second = SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 2.0)])
    stepper, parameter = Stepper(second, first=3), nn.Parameter(torch.zeros(2))
    for group, wanted in [(3, -1.0), (4, -3.0)]:
        parameter.grad = torch.ones(2)
        stepper.step(group, parameter, {})
        assert parameter.tolist() == [wanted, wanted]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("later", [False, True])
def test_each_forgets_its_own_gradients_alone(later: bool, set_to_none: bool) -> None:
    base = Gan()
    alone = copy.deepcopy(base)

    def loop(model: Any, optimizers: Any, ranks: Sequence[int]) -> list[float]:
        norms = []
        for step in range(3):
            judged = model("judge", model("generate", noise(step, ranks, 3)))
            judged.square().mean().backward()
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad(set_to_none)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        return norms

    wanted = loop(alone, two(alone), [0, 1])

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizers = sharded_gan(base, "zero2", 2, later)
        return loop(model, optimizers, [rank]), full_parameters(model)

    for norms, found in on_ranks(2, body):
        assert norms == pytest.approx(wanted, rel=1e-5)
        assert_close(found, dict(alone.named_parameters()), 3e-6)


def test_what_no_optimizer_has_keeps_its_gradient_as_in_torch() -> None:
    base = Net()
    alone = copy.deepcopy(base)

    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> list[float]:
        norms = []
        for step in range(3):
            loss_of(model, data(step)).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    wanted = loop(alone, adamw(alone.blocks.parameters()), lambda step: torch.cat([batch(step, 0), batch(step, 1)]))

    def body(rank: int) -> list[float]:
        model = copy.deepcopy(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tz.shard(model, optimizer := adamw(model.blocks.parameters()), "zero2")
        return loop(model, optimizer, lambda step: batch(step, rank))

    for norms in on_ranks(2, body):
        assert norms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_another_denominator_waits_for_the_step_of_each_that_has_gradients(plan: str) -> None:
    def body(rank: int) -> None:
        model, (by_generator, by_judge) = sharded_gan(Gan(), plan, 2)

        def backward(of: str) -> None:
            fake = model("generate", noise(0, [rank], 3))
            (fake if of == "generator" else model("judge", fake)).sum().backward()

        for of, ends in (("both", by_judge.step), ("both", by_judge.zero_grad), ("generator", by_generator.step)):
            model.set_gradient_denominator(4)
            backward(of)
            if of == "both":
                by_generator.step()
                with pytest.raises(tz.Misuse, match=r"had been divided by 4 already.* of each optimizer"):
                    model.set_gradient_denominator(6)
            ends()
            model.set_gradient_denominator(6)
            model.zero_grad()

    on_ranks(2, body)


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_checkpoints_go_on_under_another_plan(tmp_path: Path, later: bool) -> None:
    base = Gan()

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizers = sharded_gan(base, "zero1", 2)
        play(model, optimizers, [rank], 2)
        for each in optimizers:
            each.param_groups[0]["lr"] /= 2
        tz.checkpoint.save(tmp_path / "a", model, optimizers, {})
        play(model, optimizers, [rank], 2, first=2)
        resumed, others = sharded_gan(Gan(), "zero3", 2, later)
        tz.checkpoint.load(tmp_path / "a", resumed, others[::-1])
        play(resumed, others, [rank], 2, first=2)
        return full_parameters(model), full_parameters(resumed)

    for through, resumed in on_ranks(2, body):
        assert_close(resumed, through, 1e-6)


def test_a_checkpoint_wants_all_optimizers(tmp_path: Path) -> None:
    with fake_group(1):
        model, optimizers = sharded_gan(Gan(), "zero0", 1)
        for given in (optimizers[0], optimizers[:1], SGD([torch.zeros(1, requires_grad=True)])):
            with pytest.raises(tz.BadInput, match="Give all of its optimizers"):
                tz.checkpoint.save(tmp_path / "a", model, given, {})
        tz.checkpoint.save(tmp_path / "b", model, optimizers, {})
        alone = copy.deepcopy(Gan())
        one = tz.shard(alone, adamw(alone.parameters()), "zero0")[1]
        with pytest.raises(tz.BadInput, match=r"AdamW \+ SGD, this one is AdamW"):
            tz.checkpoint.load(tmp_path / "b", alone, one)
        tz.checkpoint.load(tmp_path / "b", alone, None)


class Both(NamedTuple):
    generator: Optimizer
    discriminator: Optimizer


@pytest.mark.parametrize("form", [list, tuple, Both._make])
def test_they_come_back_in_the_form_that_they_were_given_in(form: Callable[[Sequence[Optimizer]], Any]) -> None:
    with fake_group(2):
        model = Gan()
        given = form(two(model))
        back = tz.shard(model, given, "zero3")[1]
        assert type(back) is type(given) and all(one is other for one, other in zip(back, given, strict=True))


# -- what is refused -------------------------------------------------------------------------------------------


def test_what_several_optimizers_cannot_do_is_refused_before_anything_changes() -> None:
    with fake_group(2):
        for plan, precision, word in [("zero2", "fp16", "fp16"), ("zero3@cpu", "fp32", "away from the device")]:
            model = Gan()
            with pytest.raises(tz.BadInput, match=word):
                tz.shard(model, two(model), plan, precision=precision)
            assert type(model) is Gan
            tz.shard(model, None, plan, precision=precision)
            first, second = two(model)
            tz.attach(model, first)
            with pytest.raises(tz.BadInput, match=word):
                tz.attach(model, second)
        model = Gan()
        with pytest.raises(tz.BadInput, match=r"'gain' is in two optimizers"):
            tz.shard(model, [adamw(model.parameters()), SGD([model.gain])], "zero3")
        with pytest.raises(tz.BadInput, match="optimizer is a str"):
            tz.shard(model, [adamw(model.parameters()), "sgd"], "zero3")  # type: ignore[list-item]


def test_gone_optimizers_make_room(tmp_path: Path) -> None:
    with fake_group(1):
        model, optimizers = sharded_gan(Gan(), "zero0", 1)
        del optimizers[0]
        again = tz.attach(model, two(model)[0])
        play(model, [again, optimizers[0]], [0], 1)
        tz.checkpoint.save(tmp_path / "a", model, [again, optimizers[0]], {})
        assert len(engine_of(model).optimizers) == 2


@pytest.mark.parametrize("kept_by", ["nobody", "a cycle"])
def test_what_is_saved_does_not_hang_on_when_the_collector_comes(kept_by: str, tmp_path: Path) -> None:
    """An optimizer that only a cycle of objects holds is gone for a save, a comparison of copies and `tz.attach`."""
    with fake_group(1):
        model, optimizers = sharded_gan(Gan(), "zero0", 1)
        play(model, optimizers, [0], 1)
        if kept_by == "a cycle":
            optimizers[0].itself = optimizers[0]
        with without_collector():
            del optimizers[0]
            tz.checkpoint.save(tmp_path / "a", model, optimizers, {})
            states = {each.name: each.states for each in ModelState(model).parameters()}
            assert {name for name, kept in states.items() if kept} == {n for n in states if n.startswith("discr")}
            again = tz.attach(model, two(model)[0])
        play(model, [again, optimizers[0]], [0], 1)
        saved = torch.cat([piece.tensor for piece in ModelState(model).pieces() if piece.kind == "exp_avg"])
        assert saved.numel() == sum(each.numel() for each in model.parts()[0])


def test_parameters_that_no_optimizer_has_are_listed() -> None:
    with fake_group(2):
        model = Net()
        with pytest.warns(
            UserWarning, match=r"^14 trainable parameters are in no optimizer.*embed\.weight, .* and 9 more"
        ):
            tz.shard(model, adamw([model.head.bias]), "zero2")
        model = Net()
        model.embed.requires_grad_(False)
        tz.shard(model, adamw([each for each in model.parameters() if each.requires_grad]), "zero2")
        tz.shard(Net(), None, "zero2")


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "sgd foreach": lambda parameters: SGD(parameters, lr=0.1, foreach=True),
    "sgd fused": lambda parameters: SGD(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: Adam(parameters, foreach=True),
    "adamw": lambda parameters: AdamW(parameters),
    "adamw fused": lambda parameters: AdamW(parameters, fused=True),
}


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("zero0", "adamw fused"),
        ("zero0", "sgd foreach"),
        ("zero1", "adam"),
        ("zero2", "sgd"),
        ("zero3", "adamw"),
        ("zero3@cpu", "sgd fused"),
    ],
)
def test_a_step_of_an_optimizer_that_is_not_attached_raises(plan: str, kind: str) -> None:
    base = Net()

    def body(rank: int) -> None:
        model = copy.deepcopy(base)
        tz.shard(model, attached := adamw(model.blocks.parameters()), plan)
        foreign = KINDS[kind](model.head.parameters())
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match=r"tz\.attach") as caught:
            foreign.step()
        assert "(head.weight and 1 more)" in str(caught.value)
        assert not foreign.state
        attached.step()
        foreign.zero_grad()
        SGD(Net().parameters(), lr=0.1).step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(1, body)
