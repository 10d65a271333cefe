"""When updates happen: nothing of one that is under way is ever seen, and what a mode cannot do it refuses."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import ModelState, engine_of
from terrazzo.engine.buckets.unit_weights import UnitWeights
from terrazzo.engine.states.optimizer_states import OptimizerStates
from terrazzo.engine.states.restore import FullStates
from tests.engine.offload.runs import SMALL_BLOCK, TIERS, held_back
from tests.engine.test_lifecycle import Fault, Fragile
from tests.engine.toys import (
    Net,
    adamw,
    assert_close,
    assert_equal,
    batch,
    full_parameters,
    loss_of,
    mesh_for,
    on_ranks,
    sharded,
    train,
    train_alone,
)
from tests.helpers.cover import in_turns


@dataclass
class Job:
    """What a rank trains: `base` with states on one of `TIERS`."""

    base: Any
    tiers: str = "cpu"
    mode: Any = "overlapped"
    plan: str = "zero1"
    folder: Path | None = None

    def built(self, **options: Any) -> tuple[Any, Any]:
        model = copy.deepcopy(self.base)
        offload = tz.Offload(path=self.folder, step=self.mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
        plan = tz.Plan.named(self.plan).on(**TIERS[self.tiers])
        mesh = mesh_for(self.plan, 4)
        return tz.shard(model, adamw(model.parameters()), plan, offload=offload.used_under(plan), mesh=mesh, **options)


def a_step(model: Any, optimizer: Any, rank: int, number: int = 0) -> None:
    train(model, optimizer, 1, rank, first=number)


# -- overlapped: between a step and the next forward -----------------------------------------------------------


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
@pytest.mark.parametrize("tiers", ["cpu", "nvme"])
def test_whole_weights_cannot_be_read_while_they_change(
    plan: str, tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor once they have, before every rank has them; then they are what a step on the spot gives."""
    base, reads = Net(), (torch.sum, torch.Tensor.tolist, copy.deepcopy, lambda p: p.data, lambda p: p + 1)

    def body(rank: int, mode: str) -> dict[str, Tensor]:
        model, optimizer = Job(base, tiers, mode, plan, tmp_path).built()
        parameters = dict(model.named_parameters())
        a_step(model, optimizer, rank)
        if mode == "overlapped":
            for _ in range(2):
                for name, parameter in parameters.items():
                    for read in reads:
                        with pytest.raises(tz.Misuse, match=name):
                            read(parameter)
                gate.set()
                next(iter(engine_of(model).drivers)).off_device._updater.flush().wait()
        model(batch())
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    wanted = on_ranks(2, lambda rank: body(rank, "synchronous"))
    with held_back(monkeypatch) as gate:
        found = on_ranks(2, lambda rank: body(rank, "overlapped"))
    for mine, others in zip(found, wanted, strict=True):
        assert_equal(mine, others)
        assert not torch.equal(mine["head.weight"], base.head.weight)


def test_weights_of_units_that_are_updated_on_the_device_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Net()

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = Job(base, "shares" if gate is None else "half").built()
        a_step(model, optimizer, rank)
        with pytest.raises(tz.Misuse):
            model.blocks[2].up.weight.sum()
        now = model.blocks[0].up.weight.detach().clone()
        threading.Timer(0.05, gate.set).start()
        return now, full_parameters(model)["blocks.0.up.weight"]

    monkeypatch.setitem(TIERS, "half", {"optim": "cpu:0.5"})
    with held_back(monkeypatch) as gate:
        for now, later in on_ranks(2, body):
            assert torch.equal(now, later)
            assert not torch.equal(now, base.blocks[0].up.weight)


def test_norms_of_gradients_wait_for_the_update_that_scales_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping away from the device multiplies when the update comes to it."""

    def body(rank: int) -> None:
        model, optimizer = Job(BASE, "cpu").built()
        loss_of(model, batch(0, rank)).backward()
        tz.clip_grad_norm_(model, 1e-3)
        optimizer.step()
        threading.Timer(0.05, gate.set).start()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        assert torch.linalg.vector_norm(torch.stack(norms)).item() == pytest.approx(1e-3, rel=1e-3)

    with held_back(monkeypatch) as gate:
        on_ranks(2, body)


def evaluate(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        return {"loss": loss_of(model, batch(9))}


def gather(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return full_parameters(model)


def write(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    with tz.gathered(model, write=True) as parameters, torch.no_grad():
        parameters["head.bias"].mul_(2)
    return full_parameters(model)


def state_dict(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def load_state_dict(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    """The update must not come on top of what is loaded; moments are those after it."""
    model.load_state_dict({name: torch.ones(p.shape) for name, p in model.named_parameters()})
    a_step(model, optimizer, 0, 1)
    return full_parameters(model)


def save(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    path = str(folder / engine_of(model).store.settings.step)
    checkpoint.save(path, model, optimizer, {})
    source = checkpoint.open_source(path)
    return {f"{name} {kind}": source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def load(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    path = str(folder / f"{engine_of(model).store.settings.step}-0")
    checkpoint.save(path, model, optimizer, {})
    a_step(model, optimizer, 0, 1)
    checkpoint.load(path, model, optimizer)
    return full_parameters(model)


def zero_grad(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    loss_of(model, batch(3)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return full_parameters(model)


def clip(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    loss_of(model, batch(3)).backward()
    tz.clip_grad_norm_(model, 0.1)
    optimizer.step()
    return {"norm": tz.clip_grad_norm_(model, float("inf"))}


def pieces(model: Any, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    return {f"{p.name} {p.kind} {p.start}": p.tensor.clone() for p in ModelState(model).pieces()}


ACTS = [evaluate, gather, write, load_state_dict, save, load, zero_grad, clip, pieces]


@pytest.mark.parametrize(
    ("act", "tiers"),
    [
        *in_turns(((act,) for act in ACTS), ("cpu-all", "all on nvme", "nvme")),
        (state_dict, "nvme"),  # which has no weights that lie elsewhere
    ],
)
def test_who_asks_gets_the_updated_state(
    act: Callable[..., dict[str, Tensor]], tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as after a step on the spot, although no update has begun when it is asked for."""
    base = Net()

    def body(rank: int, mode: str) -> dict[str, Tensor]:
        model, optimizer = Job(base, tiers, mode, "zero0", tmp_path).built()
        a_step(model, optimizer, rank)
        if mode == "overlapped":
            threading.Timer(0.03, gate.set).start()
        found = act(model, optimizer, tmp_path)
        model.train()
        a_step(model, optimizer, rank, 2)
        return found | {f"{name} later": value for name, value in full_parameters(model).items()}

    wanted = on_ranks(2, lambda rank: body(rank, "synchronous"))
    with held_back(monkeypatch) as gate:
        found = on_ranks(2, lambda rank: body(rank, "overlapped"))
    for mine, others in zip(found, wanted, strict=True):
        assert_equal(mine, others)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("plan", "tiers"), [("zero1", "cpu"), ("zero3", "all on nvme"), ("zero2", "shares")])
def test_an_exception_while_updates_are_under_way(
    plan: str, tiers: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Fragile()

    def body(rank: int, mode: str) -> dict[str, Tensor]:
        model, optimizer = Job(base, tiers, mode, plan, tmp_path).built()
        for number in range(3):
            loss_of(model, batch(number, rank)).backward()
            gate.clear()
            threading.Timer(0.02, gate.set).start()
            optimizer.step()
            optimizer.zero_grad()
            model.fail = where
            with pytest.raises(Fault):
                loss_of(model, batch(50, rank)).backward()
            model.fail = ""
        a_step(model, optimizer, rank, 3)
        return full_parameters(model)

    with held_back(monkeypatch) as gate:
        (found,), (wanted,) = (on_ranks(1, lambda rank, m=m: body(rank, m)) for m in ("overlapped", "synchronous"))
    assert_equal(found, wanted)


# -- backward --------------------------------------------------------------------------------------------------


BASE = Net()


def in_backward(base: Any = BASE, plan: str = "zero3") -> tuple[Any, Any]:
    return Job(base, "cpu", "backward", plan).built()


def test_clipping_is_refused_and_measuring_is_not() -> None:
    def body(rank: int) -> None:
        norms = []
        for mode in ("overlapped", "backward"):
            model, optimizer = Job(BASE, "cpu", mode).built()
            loss_of(model, batch(0, rank)).backward()
            norms.append(tz.clip_grad_norm_(model, float("inf")).item())
        assert norms[0] == norms[1] > 0
        with pytest.raises(tz.Misuse, match=r"clip_grad_norm_.*step 'backward'.*overlapped"):
            tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        full_parameters(model)

    on_ranks(2, body)


def test_a_rate_that_changes_before_the_step_is_refused() -> None:
    def body(rank: int) -> None:
        model, optimizer = in_backward()
        for number in range(2):
            a_step(model, optimizer, rank, number)
            optimizer.param_groups[0]["lr"] *= 0.5  # after the step it may change
        loss_of(model, batch(2, rank)).backward()
        optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2))
        with pytest.raises(tz.Misuse, match=r"betas, lr changed between backward and optimizer\.step\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(tz.Misuse, match="half a step"):  # of the rates before
            a_step(model, optimizer, rank, 3)

    on_ranks(2, body)


def test_a_step_that_is_left_out_after_units_were_updated_is_neither_gone_on_from_nor_read(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, optimizer = in_backward()
        a_step(model, optimizer, rank)
        ema = tz.EMA(model)
        optimizer.zero_grad()  # behind a step it forgets nothing
        loss_of(model, batch(0, rank)).backward()
        optimizer.zero_grad()
        acts: list[Callable[[], object]] = [
            lambda: a_step(model, optimizer, rank),
            lambda: checkpoint.save(str(tmp_path / "half"), model, optimizer, {}),
            lambda: [*ModelState(model).pieces(with_optimizer=False)],
            lambda: model.state_dict(),
            lambda: optimizer.state_dict(),
            lambda: tz.full_state_dict(model),
            lambda: ema.update(),
            lambda: swap(ema),
        ]
        for act in acts:
            with pytest.raises(tz.Misuse, match="one that was to be left out"):
                act()
        model.load_state_dict(BASE.state_dict())
        assert_equal(full_parameters(model), dict(BASE.named_parameters()))  # weights are whole again, states are not
        with pytest.raises(tz.Misuse, match="one that was to be left out"):
            checkpoint.save(str(tmp_path / "half"), model, optimizer, {})

    on_ranks(2, body)


class WithSpare(Net):
    """A unit of it is never updated in backward: one of its parameters gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Parameter(torch.ones(3))


def test_a_step_that_raises_before_the_other_units_are_updated_is_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        model, optimizer = in_backward(WithSpare())
        loss_of(model, batch(0, rank)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(UnitWeights, "catch_up", fail)
            with pytest.raises(Fault):
                optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(tz.Misuse, match="half a step"):
            a_step(model, optimizer, rank)

    on_ranks(1, body)


def fail(*args: object) -> None:
    raise Fault


def write_weights(model: Any) -> None:
    with tz.gathered(model, write=True):
        pytest.fail("it was entered")


def swap(ema: tz.EMA) -> None:
    with ema.swapped():
        pytest.fail("it was entered")


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_half_a_step_is_neither_seen_nor_changed(plan: str, tmp_path: Path) -> None:
    """Between backward and the step; afterwards all is as in one process."""
    base = Net()
    alone = copy.deepcopy(base)
    states = adamw(alone.parameters())
    train_alone(alone, states, 3, 2)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = in_backward(base, plan)
        a_step(model, optimizer, rank)
        ema, path = tz.EMA(model), str(tmp_path / "half")
        acts: list[Callable[[], object]] = [
            lambda: checkpoint.save(path, model, optimizer, {}),
            lambda: checkpoint.load_weights(model, base.state_dict()),
            lambda: [*ModelState(model).pieces(with_optimizer=False)],
            lambda: ModelState(model).restore(FullStates({}), with_optimizer=False),
            lambda: model.state_dict(),
            lambda: model.load_state_dict(base.state_dict()),
            lambda: optimizer.state_dict(),
            lambda: optimizer.load_state_dict(states.state_dict()),
            lambda: tz.full_state_dict(model),
            lambda: write_weights(model),
            lambda: ema.update(),
            lambda: swap(ema),
        ]
        loss_of(model, batch(1, rank)).backward()
        for act in acts:
            with pytest.raises(tz.Misuse, match=r"between backward and optimizer\.step\(\).*step='overlapped'"):
                act()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        checkpoint.save(path, model, optimizer, {})
        a_step(model, optimizer, rank, 2)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


@pytest.mark.parametrize("forgotten", [True, False])
def test_both_halves_of_a_restore_end_half_a_step(forgotten: bool, tmp_path: Path) -> None:
    """What is loaded goes on as in one process; weights or states alone are the other's half step still."""
    base = Net()
    alone = copy.deepcopy(base)
    states = adamw(alone.parameters())
    train_alone(alone, states, 1, 2)
    saved = copy.deepcopy((alone.state_dict(), states.state_dict()))
    train_alone(alone, states, 1, 2, first=1)

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = in_backward(base)
        a_step(model, optimizer, rank)
        checkpoint.save(str(tmp_path / "saved"), model, optimizer, {})
        loss_of(model, batch(5, rank)).backward()
        if forgotten:
            halves = [
                lambda: optimizer.load_state_dict(saved[1]),
                lambda: model.load_state_dict({"head.bias": saved[0]["head.bias"]}, strict=False),
                lambda: model.load_state_dict(saved[0]),
            ]
            for half in halves:
                optimizer.zero_grad()
                with pytest.raises(tz.Misuse, match="half a step"):
                    a_step(model, optimizer, rank)
                half()
        else:
            checkpoint.load(str(tmp_path / "saved"), model, optimizer)
        optimizer.zero_grad()
        a_step(model, optimizer, rank, 1)
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_gradients_that_come_after_the_update_are_refused(tmp_path: Path) -> None:
    """From then on too, until a checkpoint is restored."""

    def body(rank: int) -> None:
        model, optimizer = in_backward()
        checkpoint.save(str(tmp_path / "saved"), model, optimizer, {})
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(tz.Misuse, match=r"forward of .* units have been updated already.*tz\.accumulate"):
            loss_of(model, batch(1, rank)).backward()
        optimizer.zero_grad()
        with pytest.raises(tz.Misuse, match="half a step"):
            a_step(model, optimizer, rank)
        checkpoint.load(str(tmp_path / "saved"), model, optimizer)
        a_step(model, optimizer, rank)

    on_ranks(2, body)


@pytest.mark.parametrize("restored", [True, False])
def test_a_backward_that_raised_after_it_had_updated_units(restored: bool, tmp_path: Path) -> None:
    """Nothing goes on from half a step; a restored state goes on with the rates of its own time."""
    base, rates = Fragile(), {"lr": 0.1, "weight_decay": 0.0}

    def body(rank: int, fail: bool) -> dict[str, Tensor] | None:
        model, optimizer = in_backward(base)
        checkpoint.save(str(tmp_path / f"{fail}"), model, optimizer, {})
        if fail:
            model.fail = "backward"
            with pytest.raises(Fault):
                loss_of(model, batch(0, rank)).backward()
            model.fail = ""
            optimizer.zero_grad()
            if not restored:
                with pytest.raises(tz.Misuse, match=r"half a step.*Restore a checkpoint"):
                    a_step(model, optimizer, rank)
                optimizer.zero_grad()
                with pytest.raises(tz.Misuse, match="half a step"):
                    optimizer.step()
                return None
            checkpoint.load(str(tmp_path / f"{fail}"), model, optimizer)
        optimizer.param_groups[0].update(rates)
        a_step(model, optimizer, rank)
        return full_parameters(model)

    wanted = on_ranks(2, lambda rank: body(rank, False))
    for mine, others in zip(on_ranks(2, lambda rank: body(rank, True)), wanted, strict=True):
        if restored:
            assert mine is not None
            assert others is not None
            assert_equal(mine, others)


def test_a_backward_that_raised_before_it_had_updated_units_is_retried() -> None:
    base = Net()

    def body(rank: int, fail: bool) -> dict[str, Tensor]:
        model, optimizer = in_backward(base)

        def stop(grad: Tensor) -> None:
            raise Fault

        if fail:
            logits = model(batch())
            logits.register_hook(stop)
            with pytest.raises(Fault):
                logits.sum().backward()
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.param_groups[0]["lr"] = 0.2
        a_step(model, optimizer, rank)
        return full_parameters(model)

    found, wanted = (on_ranks(2, lambda rank, f=f: body(rank, f)) for f in (True, False))
    for mine, others in zip(found, wanted, strict=True):
        assert_equal(mine, others)


def test_units_are_updated_while_backward_runs() -> None:
    """The last block's update has begun by when gradients reach the embedding."""
    begun: list[list[bool]] = []

    def body(rank: int) -> None:
        model, optimizer = in_backward()
        units = engine_of(model).units

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: begun.append([unit.weights.updating for unit in units]))

        model.embed.register_forward_hook(watch)
        a_step(model, optimizer, rank)

    on_ranks(2, body)
    assert [flags[0] for flags in begun] == [False, False]
    assert [flags[3] for flags in begun] == [True, True]


def zeroed(states: Any) -> None:
    for kept in states.values():
        for value in kept.values():
            value.zero_()


def replaced(states: Any) -> None:
    for kept in states.values():
        kept["exp_avg"] = torch.full_like(kept["exp_avg"], 1e-3)


def given_data(states: Any) -> None:
    for kept in states.values():
        kept["exp_avg_sq"].data = torch.full_like(kept["exp_avg_sq"], 1e-3)


def made_anew(states: Any) -> None:
    for key, kept in states.items():
        states[key] = {name: torch.full_like(value, 1e-3 if value.dim() else 5.0) for name, value in kept.items()}


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("change", [zeroed, replaced, given_data, made_anew])
@pytest.mark.parametrize("step", ["overlapped", "backward", "synchronous"])
def test_moments_changed_right_after_a_step_are_those_of_one_process(step: Any, change: Any) -> None:
    """An update that goes on behind the step would write them once more."""
    base = Net()

    def loop(model: Any, optimizer: Any, ranks: list[int]) -> None:
        for number in range(4):
            torch.stack([loss_of(model, batch(number, rank)) for rank in ranks]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                change(optimizer.state)

    alone = copy.deepcopy(base)
    loop(alone, adamw(alone.parameters()), [0, 1])

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero2@cpu", offload=tz.Offload(step=step))
        loop(model, optimizer, [rank])
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def test_moments_that_take_the_place_of_others_are_in_the_full_state() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net(), "zero3@cpu")
        a_step(model, optimizer, rank)
        replaced(optimizer.state)
        whole = [value for _, kind, value in OptimizerStates(engine_of(model), optimizer).whole() if kind == "exp_avg"]
        assert whole and all((value == 1e-3).all() for value in whole)

    on_ranks(2, body)


def test_moments_may_take_the_place_of_those_in_files(tmp_path: Path) -> None:
    base = Net()

    def loop(model: Any, optimizer: Any, ranks: list[int]) -> None:
        for number in range(3):
            torch.stack([loss_of(model, batch(number, rank)) for rank in ranks]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for kept in optimizer.state.values() if number == 1 else ():
                kept["exp_avg"] = torch.full(kept["exp_avg"].shape, 1e-3)

    alone = copy.deepcopy(base)
    loop(alone, adamw(alone.parameters()), [0, 1])

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, "zero3@nvme", offload=tz.Offload(path=tmp_path, direct=False))
        loop(model, optimizer, [rank])
        return full_parameters(model)

    for found in on_ranks(2, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)
