"""Whatever order a user's loop calls things in: evaluation, exceptions, repeated and skipped units, odd outputs."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of, unused_gradients
from tests.engine.toys import (
    EVERY_PLAN,
    Net,
    adamw,
    assert_close,
    batch,
    follows_one_process,
    full_parameters,
    loss_of,
    on_ranks,
    plain_loop,
    sharded,
    step,
    train,
    train_alone,
    without_collector,
)
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

# -- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_evaluation_before_between_and_after_training(plan: str, mode: Any) -> None:
    base = Net()
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    wanted = []
    for number in range(3):
        wanted.append(loss_of(alone, batch(99)).item())
        train_alone(alone, optimizer, 1, 4, first=number)

    def body(rank: int) -> list[float]:
        model, optimizer = sharded(base, plan, 4)
        losses = []
        for number in range(3):
            model.eval()
            with mode():
                losses.append(loss_of(model, batch(99)).item())
            model.train()
            train(model, optimizer, 1, rank, first=number)
        return losses

    for losses in on_ranks(4, body):
        assert losses == pytest.approx(wanted, abs=1e-5)


def test_evaluation_between_forward_and_backward() -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(3):
            loss = loss_of(model, data(number))
            with torch.no_grad():
                loss_of(model, data(50 + number))
            step(model, optimizer, loss)

    follows_one_process(Net(), loop)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "hpz"])
def test_a_forward_whose_backward_never_comes(plan: str) -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(3):
            loss_of(model, data(50 + number))
            step(model, optimizer, loss_of(model, data(number)))

    follows_one_process(Net(), loop, plan, 4)


# -- exceptions ------------------------------------------------------------------------------------------------


class Fault(RuntimeError):
    pass


class Fragile(Net):
    """Raises in the middle of a forward or of a backward when told to."""

    fail = ""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if self.fail == "forward":
            raise Fault
        if self.fail == "backward":
            x.register_hook(_raise)
        return self.head(self.blocks[2](self.blocks[1](x)))


def _raise(grad: Tensor) -> None:
    raise Fault


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_pass_that_raises_is_retried(plan: str, where: str) -> None:
    base = Fragile()
    alone = copy.deepcopy(base)
    train_alone(alone, adamw(alone.parameters()), 3, 4)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan, 4)
        for number in range(3):
            model.fail = where if number in (0, 2) else ""
            with pytest.raises(Fault) if model.fail else contextlib.nullcontext():
                loss_of(model, batch(number, rank)).backward()
            if model.fail:
                model.fail = ""
                optimizer.zero_grad()
                loss_of(model, batch(number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for found in on_ranks(4, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "zero2@cpu"])
def test_what_a_backward_that_raised_left_is_not_stepped(plan: str) -> None:
    """Plans have come to different parts of the gradients by then."""
    base = Fragile()
    alone = copy.deepcopy(base)
    train_alone(alone, adamw(alone.parameters()), 2, 2)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan)
        for number in range(2):
            model.fail = "backward"
            with pytest.raises(Fault):
                loss_of(model, batch(number, rank)).backward()
            for use in (lambda: tz.clip_grad_norm_(model, 1.0), optimizer.step):
                with pytest.raises(tz.Misuse, match=r"backward that raised.*zero_grad"):
                    use()
            model.fail = ""
            if number:  # the next forward forgets as well
                optimizer.zero_grad()
                optimizer.step()
            train(model, optimizer, 1, rank, first=number)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3@cpu"])
def test_earlier_micro_batches_are_not_lost_without_a_word(plan: str) -> None:
    """Those before a backward that raised, be they unfinished or finished; an evaluation between changes nothing."""
    base = Fragile()
    alone = copy.deepcopy(base)
    train_alone(alone, adamw(alone.parameters()), 1, 2)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan)
        for unfinished in (True, False):
            with tz.accumulate(model) if unfinished else contextlib.nullcontext():
                loss_of(model, batch(5, rank)).backward()
            model.fail = "backward"
            with pytest.raises(Fault):
                loss_of(model, batch(6, rank)).backward()
            model.fail = ""
            with torch.no_grad():
                model(batch())
            for use in (lambda: model(batch()), lambda: tz.clip_grad_norm_(model, 1.0), optimizer.step):
                with pytest.raises(tz.Misuse, match=r"backward that raised.*optimizer\.zero_grad"):
                    use()
            optimizer.zero_grad()
        train(model, optimizer, 1, rank)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_a_step_behind_a_backward_that_raised_and_an_evaluation_is_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Fragile(), "zero2")
        model.fail = "backward"
        with pytest.raises(Fault):
            loss_of(model, batch()).backward()
        model.fail = ""
        with torch.no_grad():
            model(batch())
        with pytest.raises(tz.Misuse, match=r"backward that raised.*zero_grad"):
            optimizer.step()
        train(model, optimizer, 1, rank)

    on_ranks(1, body)


def test_an_exception_leaves_the_parameters_at_rest() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(Fragile(), "zero3")
        model.fail = "forward"
        with pytest.raises(Fault):
            loss_of(model, batch())
        with pytest.raises(tz.Misuse):
            model.head.weight.tolist()

    on_ranks(2, body)


def test_no_sync_of_ddp_accumulates() -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(0, 6, 2):
            loss = loss_of(model, data(number)) / 2  # the forward outside, which DDP would not allow
            with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
                loss.backward()
            step(model, optimizer, loss_of(model, data(number + 1)) / 2)

    for plan in ("zero1", "zero3"):
        follows_one_process(Net(), loop, plan)


# -- units called in other ways --------------------------------------------------------------------------------


class Twice(Net):
    """The second block runs twice in a forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 2, 1):
            x = self.blocks[index](x)
        return self.head(x)


class TwiceInARow(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 1, 2):
            x = self.blocks[index](x)
        return self.head(x)


class Wandering(Net):
    """Calls its blocks in another order each time."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        order = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)][self.calls % 4]
        self.calls += 1
        x = self.embed(tokens)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


class Backwards(Net):
    """Calls its blocks in the reverse of their registration."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("kind", [Twice, TwiceInARow, Wandering, Backwards])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_units_in_any_order_and_number(plan: str, kind: type[Net]) -> None:
    follows_one_process(kind(), plain_loop, plan, 4)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_changed_order_costs_no_correctness_at_any_prefetch(prefetch: int) -> None:
    base = Wandering()
    alone = copy.deepcopy(base)
    for number in range(5):
        alone.calls = number  # one process takes two forwards a step
        losses = [loss_of(alone, batch(number, rank)) for rank in range(2) if setattr(alone, "calls", number) is None]
        if number == 0:
            optimizer = adamw(alone.parameters())
        step(alone, optimizer, torch.stack(losses).mean())

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3", prefetch=prefetch)
        train(model, optimizer, 5, rank)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_two_forwards_before_two_backwards() -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(3):
            first, second = loss_of(model, data(2 * number)), loss_of(model, data(2 * number + 1))
            first.backward()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()

    follows_one_process(Net(), loop)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", ["zero1", "zero3", "shard_grad_op", "hpz"])
def test_two_forwards_before_one_backward(plan: str) -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(3):
            step(model, optimizer, loss_of(model, data(2 * number)) + loss_of(model, data(2 * number + 1)))

    follows_one_process(Net(), loop, plan, 4)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_two_backwards_before_a_step_add_up(plan: str) -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        for number in range(3):
            loss_of(model, data(2 * number)).backward()
            step(model, optimizer, loss_of(model, data(2 * number + 1)))

    follows_one_process(Net(), loop, plan)


def test_backward_through_a_retained_graph_twice() -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        loss = loss_of(model, data(0))
        loss.backward(retain_graph=True)
        step(model, optimizer, loss)

    follows_one_process(Net(), loop)


def test_a_unit_called_directly() -> None:
    """Without the model's own forward: gathered when called, released after."""
    base = Net()
    x = torch.randn(4, 13)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model, _ = sharded(base, "zero3")
        with torch.no_grad():
            alone = model.blocks[1](x)
        inputs = x.clone().requires_grad_()
        model.blocks[1](inputs).sum().backward()
        with pytest.raises(tz.Misuse):
            model.blocks[1].up.weight.tolist()
        return alone, inputs.grad

    inputs = x.clone().requires_grad_()
    base.blocks[1](inputs).sum().backward()
    for alone, grad in on_ranks(2, body):
        assert torch.equal(alone, base.blocks[1](x))
        assert torch.equal(grad, inputs.grad)


# -- outputs of every kind -------------------------------------------------------------------------------------


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Structured(Net):
    """A unit and a model whose outputs are nested structures."""

    form: str = "tuple"

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        for block in self.blocks:
            block.register_forward_hook(self._wrap)

    def _wrap(self, module: nn.Module, args: Any, x: Tensor) -> Any:
        return {"tuple": (x, None, 3), "dict": {"x": x, "more": [x.detach()]}, "dataclass": Answer(x, x)}[self.form]

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            out = block(x)
            x = out[0] if self.form == "tuple" else out["x"] if self.form == "dict" else out.logits
        logits = self.head(x)
        return {"tuple": (logits, x), "dict": {"logits": logits}, "dataclass": Answer(logits, x)}[self.form]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass"])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "shard_grad_op"])
def test_outputs_may_be_structures(plan: str, form: str) -> None:
    def loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
        def logits(tokens: Tensor) -> Tensor:
            out = model(tokens)
            return out[0] if form == "tuple" else out["logits"] if form == "dict" else out.logits

        for number in range(3):
            step(model, optimizer, loss_of(logits, data(number)))  # type: ignore[arg-type]

    base = Structured(form)
    with fake_group(2):
        tz.shard(copy.deepcopy(base), None, plan)
    follows_one_process(base, loop, plan)


def test_the_ledger_returns_to_zero_after_each_step() -> None:
    def body(rank: int) -> list[int]:
        model, optimizer = sharded(Twice(), "zero3")
        readings = []
        for number in range(3):
            train(model, optimizer, 1, rank, first=number)
            readings.append(engine_of(model).tally.ledger.live_bytes)
        return readings

    assert on_ranks(2, body) == [[0, 0, 0]] * 2


def test_what_sums_are_divided_by_outlives_the_engine() -> None:
    """Of an engine that is gone nothing can be asked, and no denominator would mean an earlier micro-batch."""
    with fake_group(2):
        model, _ = tz.shard(Net(), None, "zero2")
        model.set_gradient_denominator(3.0)
        schedule = engine_of(model).schedule
        del model
        gc.collect()
        assert schedule._reductions._divisor().product == 3.0


def test_backwards_that_no_step_uses_leave_nothing_that_holds_the_model() -> None:
    with fake_group(1):
        model, optimizer = sharded(Net(), "zero2", 1)
        with unused_gradients(engine_of(model)):
            loss_of(model, batch(0, 0)).backward()
        gone = weakref.ref(engine_of(model))
        with without_collector():
            del model, optimizer
            assert gone() is None


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_a_model_that_nobody_keeps_is_not_trained_in_silence(plan: str) -> None:
    def body(rank: int) -> None:
        kept = Net()
        _, optimizer = tz.shard(nn.ModuleList([kept]), adamw(kept.parameters()), plan)
        del _
        with pytest.raises(tz.Misuse, match=r"'0\..*gone.*Keep what tz\.shard returns"):
            loss_of(kept, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match=r"AdamW.*gone.*Keep what tz\.shard returns"):
            optimizer.step()
        assert torch.isfinite(loss_of(kept, batch(0, rank)))  # weights that are whole can be used

    on_ranks(2, body)
