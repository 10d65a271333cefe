"""Optimizers whose `step` calls that of their base class, which has hooks of its own once a plain one was built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

import terrazzo as tz
from terrazzo.engine import engine_of
from tests.engine.toys import Net, adamw, assert_close, assert_equal, batch, full_parameters, loss_of, on_ranks
from tests.helpers.fake import fake_group


class Counting(AdamW):
    """Calls the step of its base class, as wrappers and schedules do."""

    elementwise = True
    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return super().step(closure)


class ByName(Counting):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return Adam.step(self, closure)


@pytest.fixture(autouse=True)
def hooked_base_classes() -> None:
    for kind in (Adam, AdamW, SGD):
        kind([torch.zeros(1, requires_grad=True)], lr=0.1)


def steps_of(kind: Any, plan: str, precision: Any, rank: int, base: Net) -> tuple[dict[str, Tensor], int, Any]:
    model = copy.deepcopy(base)
    model, optimizer = tz.shard(model, kind(model.parameters(), lr=1e-2), plan, precision=precision)
    gathered: list[int] = []
    for number in range(3):
        loss_of(model, batch(number, rank)).backward()
        engine_of(model).traffic.reset()
        optimizer.step()
        gathered.append(engine_of(model).traffic.count["all_gather"])
        optimizer.zero_grad()
    return full_parameters(model), max(gathered), optimizer


MOMENTS = tz.Precision(moments="bf16")  # type: ignore[arg-type]


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", ["fp32", "fp16", MOMENTS], ids=["fp32", "fp16", "moments in bf16"])
@pytest.mark.parametrize("kind", [Counting, ByName])
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_its_step_is_taken_once(plan: str, kind: Any, precision: Any) -> None:
    base = Net()

    def body(rank: int) -> None:
        wanted, published, _ = steps_of(AdamW, plan, precision, rank, base)
        found, count, optimizer = steps_of(kind, plan, precision, rank, base)
        assert_equal(found, wanted)
        assert count == published
        if precision == "fp16":
            assert optimizer.scaler_state()["good_steps"] == 3

    on_ranks(2, body)


class Warming(SGD):
    """A rate of its own, which its param group counts for."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)).lerp(parameter.grad, 0.5)
                    parameter.sub_(state["mean"], alpha=group["lr"] * group["steps"])


def test_what_a_step_does_once_for_a_group_is_done_once() -> None:
    """Also where states of other dtypes have each segment stepped alone."""
    base = Net()

    def body(rank: int) -> None:
        found, _, optimizer = steps_of(Warming, "zero3", MOMENTS, rank, base)
        wanted, _, _ = steps_of(Warming, "zero3", "fp32", rank, base)
        assert optimizer.param_groups[0]["steps"] == 3
        assert_close(found, wanted, 1e-2)

    on_ranks(2, body)


def test_an_overflow_is_counted_once() -> None:
    base = Net()

    def body(rank: int) -> None:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, Counting(model.parameters(), lr=1e-2), "zero2", precision="fp16")
        scale = optimizer.loss_scale
        (loss_of(model, batch(0, rank)) * float("inf")).backward()
        optimizer.step()
        assert (optimizer.skipped_steps, optimizer.loss_scale) == (1, scale / 2)

    on_ranks(2, body)


@pytest.mark.parametrize("plan", ["zero2", "zero3@cpu"])
def test_a_step_that_raised_does_not_hide_the_next_one(plan: str) -> None:
    class Failing(Counting):
        fails = False

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    base = Net()
    alone = copy.deepcopy(base)
    optimizer = adamw(alone.parameters())
    loss_of(alone, batch(0, 0)).backward()
    optimizer.step()

    def body(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, Failing(model.parameters(), lr=1e-2), plan)
        loss_of(model, batch(0, rank)).backward()
        if plan == "zero2":  # with offload the update is under way by then
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.fails = False
        optimizer.step()
        return full_parameters(model)

    assert_close(on_ranks(1, body)[0], dict(alone.named_parameters()))


@pytest.mark.parametrize("precision", ["fp32", MOMENTS], ids=["fp32", "moments in bf16"])
def test_what_it_keeps_is_found_out_without_its_hooks(precision: Any) -> None:
    called = []
    with fake_group(1):
        model = Net()
        tz.shard(model, None, "zero2@cpu", precision=precision)
        optimizer = Counting(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
        tz.attach(model, optimizer)
        assert not called


def test_attaching_again_and_again_takes_no_more_host_memory() -> None:
    with fake_group(1):
        model = Net()
        tz.shard(model, None, "zero3@cpu")
        engine, used = engine_of(model), []
        for make in (adamw, adamw, lambda given: SGD(given, lr=0.1, momentum=0.9), adamw, adamw):
            optimizer = tz.attach(model, make(model.parameters()))
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            used.append(engine.store.usage()["host_bytes"])
            engine.release_optimizer()
        assert len(set(used)) == 1
        alone, wanted = Net(), Net()
        wanted.load_state_dict(alone.state_dict())
        alone, optimizer = tz.shard(alone, adamw, "zero3@cpu")
        before = engine_of(alone).store.usage()["host_bytes"]
        engine_of(alone).release_optimizer()
        optimizer = tz.attach(alone, adamw(alone.parameters()))
        assert engine_of(alone).store.usage()["host_bytes"] == before
        reference = adamw(wanted.parameters())
        for number in range(2):
            for each, by in ((alone, optimizer), (wanted, reference)):
                loss_of(each, batch(number)).backward()
                by.step()
                by.zero_grad()
        assert_close(full_parameters(alone), dict(wanted.named_parameters()))
