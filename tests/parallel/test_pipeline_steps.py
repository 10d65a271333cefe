"""Steps of a pipeline behind one that was given up, and under `torch.autocast`."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import terrazzo as tz
from terrazzo.parallel.pipeline.deferred_weight_gradients import DeferredWeights
from tests.helpers.processes import run_in_processes
from tests.helpers.threads import run_in_threads


class GivenUp(Exception):
    pass


@pytest.fixture
def base() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(8, 8, bias=place != 2) for place in range(4)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd_of(model.parameters())


def sgd_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(seed: int, rows: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, 8, generator=draw), torch.randn(rows, 8, generator=draw)) for _ in range(3)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().sum()


def cut(base: nn.Module, schedule: Any = "1f1b") -> tuple[Any, Any]:
    model, mesh = copy.deepcopy(base), tz.mesh(pp=2, device="cpu")
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule))
    return tz.shard(model, sgd_of, "zero3", mesh=mesh)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
    total = torch.zeros(())
    for inputs, targets in micro_batches:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


def gives_up(base: nn.Module) -> list[float]:
    """The first stage has sent three micro-batches and the second one has taken two, as both give up.

    The third is the first of its shape.
    """
    rank, calls = torch.distributed.get_rank(), []
    model, optimizer = cut(base)

    def stop(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == (2 if rank else 5):  # the auxiliary function is asked of both modules of the stage
            time.sleep(0.2)  # what the other one waits for comes
            raise GivenUp
        return loss_of(*given) if rank else None

    with pytest.raises(GivenUp):
        tz.step(
            model,
            [*batches(1)[:2], batches(1, rows=5)[2]],
            stop if rank else loss_of,
            auxiliary=(lambda module: None) if rank else stop,
        )
    optimizer.zero_grad()
    found = []
    for micro_batches in (batches(2, rows=5), batches(3)):
        found.append(float(tz.step(model, micro_batches, loss_of, denominator=1)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.processes
def test_what_was_under_way_when_a_step_was_given_up_comes_into_no_other(base: nn.Sequential) -> None:
    plain = copy.deepcopy(base)
    optimizer = sgd(plain)
    expected = [plain_step(plain, optimizer, batches(2, rows=5)), plain_step(plain, optimizer, batches(3))]
    for found in run_in_processes(2, gives_up, base, timeout_s=20.0):
        assert found == pytest.approx(expected, rel=1e-6)


class UnderAutocast(nn.Module):
    """Of which backward knows nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("around", ["the step", "each module"])
def test_a_step_under_autocast_is_that_of_one_process(base: nn.Sequential, schedule: str, around: str) -> None:
    inside = around == "each module"
    if inside:
        base = nn.Sequential(*map(UnderAutocast, base))
    plain = copy.deepcopy(base)
    optimizer = sgd(plain)
    expected = []
    for seed in (1, 2):
        # It keeps what it has cast until its end. The second step is without: other dtypes go from stage to stage.
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside and seed == 1):
            expected.append(plain_step(plain, optimizer, batches(seed)))

    def body(rank: int) -> None:
        model, optimizer = cut(base, schedule)
        found = []
        for seed in (1, 2):
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside and seed == 1):
                found.append(float(tz.step(model, batches(seed), loss_of, denominator=1)))
            optimizer.step()
            optimizer.zero_grad()
        assert found == expected
        state = tz.full_state_dict(model, keep=True)
        assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())

    run_in_threads(2, body, timeout_s=10.0)


def test_linear_maps_whose_weights_are_computed_put_nothing_off(base: nn.Sequential) -> None:
    for module in base:
        weight_norm(module)
    plain = copy.deepcopy(base)
    optimizer = sgd(plain)
    expected = [plain_step(plain, optimizer, batches(seed)) for seed in (1, 2)]

    def body(rank: int) -> None:
        model, optimizer = cut(base, "zero_bubble")
        for seed, loss in zip((1, 2), expected, strict=True):
            assert float(tz.step(model, batches(seed), loss_of, denominator=1)) == pytest.approx(loss, rel=1e-6)
            optimizer.step()
            optimizer.zero_grad()
        state = tz.full_state_dict(model, keep=True)
        for name, each in plain.state_dict().items():
            torch.testing.assert_close(state[name], each)

    run_in_threads(2, body, timeout_s=10.0)


def test_weights_wait_whatever_hooks_the_engine_has_on_them(
    base: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two linear maps in each of two stages, three micro-batches, two steps: each gradient is put off."""
    put_off: list[Tensor] = []
    add = DeferredWeights.add
    monkeypatch.setattr(
        DeferredWeights, "add", lambda self, weight, *rest: put_off.append(weight) or add(self, weight, *rest)
    )

    def body(rank: int) -> None:
        model, optimizer = cut(base, "zero_bubble")
        for seed in range(2):
            tz.step(model, batches(seed), loss_of)
            optimizer.step()
            optimizer.zero_grad()

    run_in_threads(2, body)
    assert len(put_off) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_maps_in_eight_bits_are_those_of_one_process(
    recipe: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off: list[Tensor] = []
    add = DeferredWeights.add
    monkeypatch.setattr(
        DeferredWeights,
        "add",
        lambda self, weight, *rest, **by: put_off.append(weight) or add(self, weight, *rest, **by),
    )
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 8))
    assert tz.nn.float8(base, recipe).names == ("1", "2")
    plain = copy.deepcopy(base)
    optimizer = sgd(plain)
    expected = [plain_step(plain, optimizer, batches(seed)) for seed in (1, 2)]

    def body(rank: int) -> None:
        model, optimizer = cut(base, schedule)
        found = []
        for seed in (1, 2):
            found.append(float(tz.step(model, batches(seed), loss_of, denominator=1)))
            optimizer.step()
            optimizer.zero_grad()
        assert found == expected
        state = tz.full_state_dict(model, keep=True)
        assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items())

    run_in_threads(2, body, timeout_s=10.0)
    assert len(put_off) == (4 * 3 * 2 if schedule == "zero_bubble" else 0)  # layers, micro-batches, steps


class Ascends(nn.Module):
    """Looks for a worse input by a gradient of its own before it computes, as adversarial training does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(at).square().sum(), at)
            x = x + 0.1 * slope.sign()
        output: Tensor = self.inner(x)
        return output


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_gradients_asked_for_by_name_add_nothing_to_those_of_weights(eight_bits: bool, schedule: str) -> None:
    """In forwards, and in the loss: of an activation behind which the head's weight is, and of that weight."""
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(8, 16), Ascends(), nn.Linear(16, 16), nn.Linear(16, 8))
    if eight_bits:
        assert tz.nn.float8(base, skip=["0", "3"]).names == ("1.inner", "2")

    def asked(model: nn.Sequential, seen: list[Tensor]) -> Any:
        hidden: list[Tensor] = []
        model[2].register_forward_pre_hook(lambda module, given: hidden.append(given[0]))

        def loss(output: Tensor, target: Tensor) -> Tensor:
            found = loss_of(output, target)
            wanted = [hidden[-1], model[2].weight]
            seen.extend(torch.autograd.grad(found, wanted, retain_graph=True))
            return found

        return loss

    plain, wanted = copy.deepcopy(base), []
    optimizer, loss_fn = sgd(plain), asked(plain, wanted)
    total = sum(loss_fn(plain(inputs), targets) for inputs, targets in batches(1))
    assert isinstance(total, Tensor)
    total.backward()
    optimizer.step()

    def body(rank: int) -> None:
        model, mesh, seen = copy.deepcopy(base), tz.mesh(pp=2, device="cpu"), []
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule, split=["2"]))
        model, optimizer = tz.shard(model, sgd_of, "zero2", mesh=mesh)
        tz.step(model, batches(1), asked(model, seen) if rank else loss_of, denominator=1)
        optimizer.step()
        state = tz.full_state_dict(model, keep=True)
        for name, each in plain.state_dict().items():
            torch.testing.assert_close(state[name], each)
        for found, each in zip(seen, wanted if rank else [], strict=True):
            torch.testing.assert_close(found, each)

    run_in_threads(2, body, timeout_s=10.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_penalties_on_gradients_are_those_of_one_process(base: nn.Sequential, schedule: str) -> None:
    """Also of a loss that is linear in the outputs, whose gradient there is a constant."""

    def penalized(model: nn.Sequential) -> Any:
        hidden: list[Tensor] = []
        model[2].register_forward_pre_hook(lambda module, given: hidden.append(given[0]))

        def loss(output: Tensor, target: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(output.sum(), hidden[-1], create_graph=True)
            return loss_of(output, target) + slope.square().sum()

        return loss

    plain = copy.deepcopy(base)
    optimizer, loss_fn = sgd(plain), penalized(plain)
    sum(loss_fn(plain(inputs), targets) for inputs, targets in batches(1)).backward()  # type: ignore[union-attr]
    optimizer.step()

    def body(rank: int) -> None:
        model, mesh = copy.deepcopy(base), tz.mesh(pp=2, device="cpu")
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule, split=["2"]))
        model, optimizer = tz.shard(model, sgd_of, "zero2", mesh=mesh)
        tz.step(model, batches(1), penalized(model) if rank else loss_of, denominator=1)
        optimizer.step()
        state = tz.full_state_dict(model, keep=True)
        for name, each in plain.state_dict().items():
            torch.testing.assert_close(state[name], each)

    run_in_threads(2, body, timeout_s=10.0)
