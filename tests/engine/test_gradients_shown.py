"""`parameter.grad` after `tz.shard`: torch's own clipping, zeroing and penalties do what they do in one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import terrazzo as tz
from tests.engine.toys import (
    EVERY_PLAN,
    Net,
    adamw,
    assert_close,
    batch,
    follows_one_process,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
    sharded,
)
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group

CLIP = 0.05


def clipped_training(model: Any, optimizer: Any, rank: int | None, micros: int = 1, **clip: Any) -> list[float]:
    """Three steps with torch's clipping; in one process (rank None) on the batches of two ranks."""
    norms = []
    for step in range(3):
        for micro in range(micros):
            last = micro == micros - 1
            with contextlib.nullcontext() if last or rank is None else tz.accumulate(model):
                ranks = [rank] if rank is not None else [0, 1]
                losses = [loss_of(model, batch(10 * step + micro, each)) for each in ranks]
                torch.stack(losses).mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), CLIP, **clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(
    ("plan", "micros"),
    mostly_long(
        [("zero0", 3), ("zero1", 1), ("zero2", 3), ("zero3", 1), ("zero3", 3), ("zero3@cpu", 3), ("zero2@cpu-all", 1)],
        *(("zero1", 1), ("zero3", 3), ("zero3@cpu", 3), ("zero2@cpu-all", 1)),
    ),
)
def test_torchs_clipping_is_that_of_one_process(plan: str, micros: int) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    wanted = clipped_training(alone, adamw(alone.parameters()), None, micros)
    assert min(wanted) > CLIP

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = sharded(base, plan)
        return clipped_training(model, optimizer, rank, micros), full_parameters(model)

    for norms, found in on_ranks(2, body):
        assert norms == pytest.approx(wanted, rel=1e-5)
        assert_close(found, dict(alone.named_parameters()), 3e-6)


def clipped_both_ways(base: nn.Module, rank: int, *arguments: Any, **options: Any) -> list[float]:
    """Norms of two steps that torch's function clips, then of the same two that the engine's does."""
    norms = []
    for clip in (lambda model: clip_grad_norm_(model.parameters(), CLIP), lambda m: tz.clip_grad_norm_(m, CLIP)):
        model, optimizer = sharded(base, *arguments, **options)
        for step in range(2):
            loss_of(model, batch(step, rank)).backward()
            norms.append(clip(model).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("plan", ["hybrid_shard", "hfsdp", "hpz"])
def test_torchs_clipping_is_ours_on_two_axes(plan: str) -> None:
    base = Net()

    for norms in on_ranks(4, lambda rank: clipped_both_ways(base, rank, plan, 4)):
        assert norms[:2] == pytest.approx(norms[2:], rel=1e-6)


@pytest.mark.parametrize("clip", [{"norm_type": float("inf")}, {"norm_type": 1.0}, {"foreach": False}])
def test_torchs_other_ways_to_clip(clip: dict[str, Any]) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    wanted = clipped_training(alone, adamw(alone.parameters()), None, **clip)
    for norms in on_ranks(2, lambda rank: clipped_training(*sharded(base, "zero2"), rank, **clip)):
        assert norms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_torchs_clipping_in_16_bits_is_ours(precision: str) -> None:
    base = Net()

    for norms in on_ranks(2, lambda rank: clipped_both_ways(base, rank, "zero2", precision=precision)):
        assert norms[:2] == pytest.approx(norms[2:], rel=1e-5)


def test_a_part_of_the_parameters_can_be_clipped() -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for number in range(3):
            loss_of(model, data(number)).backward()
            clip_grad_norm_(model.blocks[1].parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

    follows_one_process(Net(), loop)


class Penalty:
    """A loss with a penalty on all weights, whose gradients come before any of the model's own."""

    def __init__(self, micros: int) -> None:
        self.micros = micros

    def __call__(self, model: Any, optimizer: Any, data: Any) -> None:
        accumulate = tz.accumulate if hasattr(model, "set_gradient_denominator") else lambda _: contextlib.nullcontext()
        for number in range(3):
            for micro in range(self.micros):
                with accumulate(model) if micro < self.micros - 1 else contextlib.nullcontext():
                    loss = loss_of(model, data(10 * number + micro))
                    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
                    (1e-2 * penalty + loss).backward()
            optimizer.step()
            if number:  # gradients of the first step are there when the second one's come
                optimizer.zero_grad()


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_a_penalty_on_all_weights(plan: str, micros: int) -> None:
    follows_one_process(Net(), Penalty(micros), plan)


def test_two_forwards_before_two_backwards_with_a_penalty() -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for number in range(3):
            losses = [loss_of(model, data(10 * number + each)) for each in range(2)]
            penalties = [sum(parameter.pow(2).sum() for parameter in model.parameters()) for _ in range(2)]
            for loss, penalty in zip(losses, penalties, strict=True):
                (penalty + loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    follows_one_process(Net(), loop, "zero0")


def test_a_submodules_zero_grad_forgets_its_part_alone() -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for number in range(3):
            loss_of(model, data(number)).backward()
            model.blocks[1].zero_grad()
            model.blocks[2].zero_grad(set_to_none=False)
            loss_of(model, data(5 + number)).backward()
            optimizer.step()
            model.zero_grad()

    follows_one_process(Net(), loop, "zero2")


@pytest.mark.parametrize("plan", ["zero1", "zero3", "zero3@cpu"])
def test_signs_and_numbers_in_place_of_what_is_not_finite(plan: str) -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for number in range(3):
            loss_of(model, data(number)).backward()
            model.blocks[0].up.weight.grad.sign_()
            model.blocks[1].up.weight.grad.div_(0).nan_to_num_(nan=0.5, posinf=2.0, neginf=-1.0)
            optimizer.step()
            optimizer.zero_grad()

    follows_one_process(Net(), loop, plan)


def test_changes_by_the_names_of_torchs_arguments() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        grad: Any = model.head.bias.grad
        before = grad.norm()
        grad.mul_(other=0.25).div_(other=0.5)
        assert torch.equal(grad.norm(), before * 0.5)
        assert grad.clamp_(min=0.0, max=0.0).norm() == 0

    on_ranks(1, body)


@pytest.mark.parametrize("change", ["mul_", "div_", "clamp_"])
def test_what_has_a_number_for_each_element_is_refused_on_all_ranks(change: str) -> None:
    """Ranks hold different elements: a mask would land on the wrong ones, or on none."""

    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero3")
        loss_of(model, batch(0, rank)).backward()
        weight = model.head.weight
        with pytest.raises(tz.Misuse, match=f"{weight.numel()} elements"):
            getattr(weight.grad, change)(torch.ones(weight.shape))

    on_ranks(2, body)


def test_clipping_between_micro_batches_is_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero1")
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match="still being accumulated"):
            clip_grad_norm_(model.parameters(), 1.0)
        model.blocks[0].zero_grad()
        with pytest.raises(tz.Misuse, match="still being accumulated"):
            loss_of(model, batch(0, rank)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(0, rank)).backward()
        assert clip_grad_norm_(model.parameters(), 1.0).item() > 0

    on_ranks(2, body)


def test_an_optimizers_groups_have_the_parameters_and_their_gradients() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        given = [each for group in optimizer.param_groups for each in group["params"]]
        assert all(map(operator.is_, given, model.parameters()))
        assert clip_grad_norm_(given, 1e9) == clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.param_groups[0]["params"].pop()
        with pytest.raises(tz.Misuse, match=r"param_groups\[0\].* were changed"):
            optimizer.step()

    on_ranks(1, body)


class Failing(torch.optim.SGD):
    elementwise, fails = True, False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


class Halving(torch.optim.SGD):
    """Changes gradients in place."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_norm_that_was_taken_before_a_step_is_not_shown_after_it(plan: str) -> None:
    def norms(model: Any, optimizer: Any) -> Tensor:
        loss_of(model, batch()).backward()
        found = [parameter.grad.norm() for parameter in model.parameters()]
        optimizer.step()
        return torch.stack([*found, *(parameter.grad.norm() for parameter in model.parameters())])

    base = Net()
    alone = copy.deepcopy(base)
    wanted = norms(alone, Halving(alone.parameters(), lr=0.1))

    def body(rank: int) -> Tensor:
        return norms(*tz.shard(copy.deepcopy(base), lambda given: Halving(given, lr=0.1), plan))

    for found in on_ranks(2, body):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("forget", [False, True])
def test_a_step_that_raised_leaves_the_parameters_in_the_groups(forget: bool) -> None:
    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), lambda parameters: Failing(parameters, lr=0.1), "zero3")
        optimizer.fails = True
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        if forget:
            optimizer.zero_grad()
        else:
            loss_of(model, batch(0, rank)).backward()
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], model.parameters()))

    on_ranks(2, body)


def test_a_gradient_that_is_put_back_after_it_was_forgotten_is_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        grad = model.head.bias.grad
        optimizer.zero_grad()
        model.head.bias.grad = grad
        with pytest.raises(tz.Misuse, match=r"'head\.bias' was put back"):
            optimizer.step()

    on_ranks(1, body)


def _drop(model: Any, optimizer: Any, rank: int) -> None:
    model.head.bias.grad = None


def _scale(model: Any, optimizer: Any, rank: int) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


ALONE = {
    "head.bias.grad = None": _drop,
    "zero_grad()": lambda model, optimizer, rank: optimizer.zero_grad(),
    "zero_grad(set_to_none=False)": lambda model, optimizer, rank: model.zero_grad(set_to_none=False),
    "head.bias.grad.zero_()": lambda model, optimizer, rank: model.head.bias.grad.zero_(),
    "mul_(0.5)": _scale,
}


@pytest.mark.parametrize(
    ("what", "plan"), [*zip(ALONE, ["zero0", "zero2", "zero3", "zero1", "zero2@cpu"], strict=True)]
)
def test_what_one_rank_alone_does_to_gradients_is_noticed(what: str, plan: str) -> None:
    """Here as often on every rank, but not before the same step."""

    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), plan)
        for step in range(2):
            loss_of(model, batch(step, rank)).backward()
            if rank == step:
                ALONE[what](model, optimizer, rank)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(tz.RanksApart, match=r"gradients have been forgotten or changed on some ranks") as caught:
        on_ranks(2, body)
    assert what in str(caught.value) or "zero_grad()" in str(caught.value)


@pytest.mark.parametrize("change", ["mul_", "clamp_"])
def test_numbers_in_tensors_that_differ_are_noticed(change: str) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        getattr(model.head.bias.grad, change)(torch.tensor(float(rank + 1)))
        optimizer.step()
        with pytest.raises(tz.RanksApart, match=rf"head\.bias\.grad\.{change}\({rank + 1}\.0\)"):
            loss_of(model, batch(1, rank)).backward()

    on_ranks(2, body)


def test_numbers_that_differ_are_noticed() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        tz.clip_grad_norm_(model, 1.0 + rank)
        optimizer.step()
        loss_of(model, batch(1, rank)).backward()

    with pytest.raises(tz.RanksApart, match=r"by other numbers.*clip_grad_norm_"):
        on_ranks(2, body)


def test_micro_batches_that_one_rank_forgets_are_noticed() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero0")
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        if rank == 0:
            optimizer.zero_grad()
        loss_of(model, batch(1, rank)).backward()

    with pytest.raises(tz.RanksApart, match=r"gradients have been forgotten"):
        on_ranks(2, body)


def test_ranks_may_differ_in_what_changes_nothing() -> None:
    """The order of a loop, what is zeroed without gradients, and a forward that raised on one rank: all go on."""

    class Failing(Net):
        fails = False

        def forward(self, tokens: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("out of memory")
            return super().forward(tokens)

    base = Failing()

    def body(rank: int) -> None:
        model, optimizer = sharded(copy.deepcopy(base), "zero0")
        for step in range(3):
            if rank == 0:
                optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            for parameter in [*model.parameters()][:: 1 - 2 * rank]:
                parameter.grad.mul_(0.5)
            optimizer.step()
            model.zero_grad() if rank else optimizer.zero_grad()
        model.fails = rank == 0
        with contextlib.suppress(ValueError), tz.accumulate(model):
            loss_of(model, batch(3, rank)).backward()
        optimizer.zero_grad()
        model.fails = False
        loss_of(model, batch(4, rank)).backward()

    on_ranks(2, body)


def test_a_gradient_that_is_replaced_is_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        model.head.bias.grad = torch.zeros(17)
        with pytest.raises(tz.Misuse, match=r"'head\.bias'.*replaced"):
            optimizer.step()

    on_ranks(1, body)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3"])
def test_a_gradient_set_by_hand_is_refused_whatever_was_shown(plan: str) -> None:
    class Partly(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    def body(rank: int) -> None:
        model, optimizer = sharded(Partly(), plan)
        bias = model.blocks[1].up.bias
        for backward in (False, True):  # none has been shown, or those of others
            if backward:
                loss_of(model, batch(0, rank)).backward()
            before = full_parameters(model)
            bias.grad = torch.ones(bias.shape)
            for use in (optimizer.step, lambda: tz.clip_grad_norm_(model, 1.0)):
                with pytest.raises(tz.Misuse, match=r"'blocks\.1\.up\.bias'.*replaced"):
                    use()
            assert all(torch.equal(before[name], value) for name, value in full_parameters(model).items())
            optimizer.zero_grad()
            optimizer.step()  # forgotten

    on_ranks(2, body)


def test_a_gradient_set_by_hand_that_backward_adds_to_is_that_of_one_process() -> None:
    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        loss_of(model, data(0)).backward()
        optimizer.step()

    follows_one_process(Net(), loop, "zero2")


def test_the_gradient_of_a_parameter_that_nothing_steps_is_the_users() -> None:
    def body(rank: int) -> None:
        model = Net()
        with pytest.warns(UserWarning, match="in no optimizer"):
            model, optimizer = tz.shard(model, adamw(model.head.parameters()), "zero2")
        model.embed.weight.grad = torch.ones(model.embed.weight.shape)
        optimizer.step()

    on_ranks(1, body)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_raises_if_asked(norm: float) -> None:
    def body(rank: int) -> None:
        model, _ = sharded(nn.Linear(4, 4), "zero2")
        (model(torch.ones(2, 4)) * (norm if rank else 1.0)).sum().backward()
        before = tz.clip_grad_norm_(model, float("inf"))
        with pytest.raises(tz.Diverged, match="cannot be clipped"):
            tz.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert not torch.isfinite(before)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        tz.clip_grad_norm_(model, 1.0)

    on_ranks(2, body)


def test_every_plan_shows_gradients_where_there_are_some() -> None:
    class Partly(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.embed(tokens)))

    def body(rank: int) -> None:
        for plan in EVERY_PLAN:
            model, optimizer = tz.shard(Partly(), adamw, plan, mesh=mesh_for(plan, 4))
            loss_of(model, batch(0, rank)).backward()
            shown = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
            assert shown == {n for n, _ in model.named_parameters() if "blocks.1" not in n and "blocks.2" not in n}
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())

    on_ranks(4, body)


def test_a_gradient_that_outlives_its_model_says_so() -> None:
    with fake_group(1):
        model, _ = tz.shard(Net(), None, "zero3")
        loss_of(model, batch()).backward()
        parameter = model.head.weight
        del model
        gc.collect()
        for use in (lambda grad: grad.norm(), lambda grad: grad.mul_(0.5)):
            with pytest.raises(tz.Misuse, match=r"'head\.weight\.grad' belongs to a sharded model that is gone.*Keep"):
                use(parameter.grad)


@pytest.mark.parametrize("plan", ["zero0", "zero2"])
def test_at_a_rate_of_zero_a_gradient_that_no_step_would_use_is_refused(plan: str) -> None:
    """Moments would not have it when a warm-up goes on; one of zeros, with which torch has states made, is no loss."""
    with fake_group(1):
        model = Net()
        model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters(), lr=0.0), plan)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(tz.Misuse, match="by hand"):
            optimizer.step()


def test_a_measure_by_keyword_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(Net(), None, "zero2")
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match=r"head\.weight"):
            torch.sum(input=model.head.weight.grad)

    on_ranks(2, body)


def test_norms_of_other_orders_on_ranks_are_refused_on_each() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Net(), "zero2")
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.RanksApart, match=rf"rank {rank} at the gradients' norms of order {rank + 1}"):
            model.head.weight.grad.norm(rank + 1)

    on_ranks(2, body)


def test_zeros_of_unfinished_gradients_are_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero2")
        with tz.accumulate(model):
            loss_of(model, batch(0, rank)).backward()
        for owner in (optimizer, model):
            with pytest.raises(
                tz.Misuse, match=r"zero_grad\(set_to_none=False\) was called while gradients were still"
            ):
                owner.zero_grad(set_to_none=False)
        loss_of(model, batch(1, rank)).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    on_ranks(2, body)
