"""On every tier each bit is that of a single process that knows nothing of tiers."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR

import terrazzo as tz
from terrazzo.engine import LossScaling, Precision
from terrazzo.engine.offload.nvme.swap_file import SwapFile
from terrazzo.engine.optim.stock import stepper
from tests.engine.models import base_model
from tests.engine.offload.runs import (
    MODES,
    MOMENTS,
    PLANS,
    SMALL_BLOCK,
    TIERS,
    Runner,
    assert_reference,
    assert_same,
    check,
    expected,
    fused,
    held_back,
    on_tiers,
    plan_id,
    train,
)
from tests.engine.parity import FEATURES, Case, Ranks, axes, with_feature
from tests.engine.reference import FIRST_SCALE, Trainer
from tests.engine.test_parity_optimizers import OPTIMIZERS, in_groups
from tests.helpers.cover import in_turns, mostly_long
from tests.helpers.threads import run_in_threads

PRECISIONS: dict[str, dict[str, Any]] = {
    **{name: {"precision": name} for name in ("fp32", "bf16", "bf16-pure", "fp16")},
    "bf16 moments": {"dtypes": MOMENTS},
}
STATES = ("weight", "grad", "optim")
TOGETHER = ("cpu-all", "all on nvme", "shares")
FEW = [
    (Case("zero1", 3), "cpu-all"),
    (Case("zero2", 2), "nvme"),
    (Case("zero3", 2), "all on nvme"),
    (Case("zero3", 3), "shares"),
    (Case("hpz", 2, replicas=2), "crossed"),
]
"""A plan and tiers for what need not be tried with all."""


CHANGED = ({"digest": True}, {"depth": 1}, {"block_mib": 4})


def few_id(value: Any) -> str:
    return plan_id(value) if isinstance(value, Case) else str(value)


def tier_of_states(tiers: str) -> dict[str, object]:
    """Axes of a cover."""
    return {state: TIERS[tiers].get(state) for state in STATES}


def tier_of_update(tiers: str) -> dict[str, object]:
    """The axes of those that an update reads and writes."""
    return {state: tier for state, tier in tier_of_states(tiers).items() if state != "weight"}


def modes_for(precision: str) -> tuple[str, ...]:
    return MODES[:2] if precision == "fp16" else MODES  # which must see all gradients first


# -- plans, tiers and precisions -------------------------------------------------------------------------------


@pytest.mark.cover(turns=2, case=axes, tiers=tier_of_states)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tiers", [*(f"{state} on {tier}" for tier in ("cpu", "nvme") for state in STATES), *TOGETHER])
@pytest.mark.parametrize("case", [case for case in PLANS if case.replicas is None], ids=plan_id)
def test_every_tier_under_a_plan_of_one_axis(case: Case, tiers: str, precision: str, tmp_path: Path) -> None:
    turn = PLANS.index(case) + list(TIERS).index(tiers) + list(PRECISIONS).index(precision)
    modes = modes_for(precision)
    check(on_tiers(replace(case, steps=2, **PRECISIONS[precision]), tiers, tmp_path, modes[turn % len(modes)]))


@pytest.mark.cover(strength=1, case=axes, tiers=tier_of_states)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("case", [case for case in PLANS if case.replicas], ids=plan_id)
def test_every_tier_under_a_plan_of_two_axes(case: Case, tiers: str, tmp_path: Path) -> None:
    """Precisions and modes take turns."""
    turn = PLANS.index(case) + list(TIERS).index(tiers)
    name = list(PRECISIONS)[turn % len(PRECISIONS)]
    modes = modes_for(name)
    check(on_tiers(replace(case, steps=2, **PRECISIONS[name]), tiers, tmp_path, modes[turn % len(modes)]))


# -- what a model and a step may be like -----------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, case=lambda case: {}, tiers=tier_of_update)
@pytest.mark.parametrize(
    "feature", [name for name in FEATURES if name not in ("plain", "frozen", "accumulating_locally")]
)
@pytest.mark.parametrize(("case", "tiers"), FEW, ids=few_id)
def test_features(case: Case, tiers: str, feature: str, tmp_path: Path) -> None:
    mode = MODES[list(FEATURES).index(feature) % 3]
    check(on_tiers(replace(with_feature(case, feature), steps=3), tiers, tmp_path, mode))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "tiers"), mostly_long(FEW, FEW[0], FEW[2], FEW[3]), ids=few_id)
def test_shards_of_several_cells_and_gradients_that_come_and_go(
    case: Case, tiers: str, mode: str, tmp_path: Path
) -> None:
    check(on_tiers(replace(case, variant="wide", steps=4), tiers, tmp_path, mode))


@pytest.mark.parametrize(
    ("case", "tiers", "local"),
    [*in_turns(FEW[2:], [True, None]), *(pytest.param(*few, True, marks=pytest.mark.long) for few in FEW[:2])],
    ids=few_id,
)
def test_accumulation_of_gradients_that_come_and_go(case: Case, tiers: str, local: bool | None, tmp_path: Path) -> None:
    check(on_tiers(replace(case, variant="wide", micro_batches=2, local=local, steps=4), tiers, tmp_path))


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("case", "tiers", "mode"),
    [
        (Case("zero3", 2, variant="wide"), "all on nvme", "overlapped"),
        pytest.param(
            Case("zero1", 2, variant="unused", precision="bf16"), "cpu-all", "backward", marks=pytest.mark.long
        ),
        pytest.param(Case("zero2", 2, precision="fp16"), "shares", "overlapped", marks=pytest.mark.long),
    ],
    ids=few_id,
)
def test_many_steps(case: Case, tiers: str, mode: str, steps: int, tmp_path: Path) -> None:
    check(on_tiers(replace(case, steps=steps), tiers, tmp_path, mode))


@pytest.mark.parametrize(
    "settings",
    mostly_long([{"digest": True}, {"depth": 1}, {"block_mib": 4}, {"threads": 1}, {"depth": 32}], *CHANGED),
)
def test_settings_change_no_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    check(on_tiers(Case("zero3", 2, variant="wide", steps=4), "all on nvme", tmp_path, **settings))


@pytest.mark.filterwarnings("ignore:.*refuses O_DIRECT")
def test_several_folders_past_the_page_cache(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    case = on_tiers(Case("zero3", 2, variant="wide", steps=4), "all on nvme", direct=True)
    assert case.offload is not None
    check(replace(case, offload=replace(case.offload, path=tuple(folders))))


# -- the optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("tiers", ["cpu", "all on nvme"])
@pytest.mark.parametrize(
    "name",
    mostly_long(
        ("AdamW", "Adam amsgrad", "SGD", "SGD nesterov", "Adagrad", "RMSprop", "NAdam", "ASGD", "Rprop", "Lion"),
        *("AdamW", "Adam amsgrad", "SGD nesterov", "ASGD", "Lion"),
    ),
)
def test_other_optimizers_and_groups(name: str, tiers: str, tmp_path: Path) -> None:
    """Where the user leaves the kernel of Adam open it is the fused one."""
    open_ = OPTIMIZERS[name][0] in (torch.optim.Adam, torch.optim.AdamW)

    def fused_if_open(model: nn.Module) -> Optimizer:
        optimizer = in_groups(model, name)
        for group in optimizer.param_groups if open_ else ():
            group["fused"] = True
        return optimizer

    case = Case("zero3", 2, variant="unused", steps=4)
    trainer = Trainer(case.recipe, fused_if_open, padded=open_)
    wanted = [trainer.step() for _ in range(case.steps)]
    ranks = train(on_tiers(case, tiers, tmp_path), make_optimizer=lambda model: in_groups(model, name))
    assert_reference(case, ranks, wanted)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """It changes momenta as well as rates."""
    return OneCycleLR(optimizer, max_lr=[1e-2, 3e-2, 5e-3], total_steps=8)


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LinearLR(optimizer, start_factor=0.1, total_iters=3)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("schedule", [one_cycle, warm_up])
@pytest.mark.parametrize(("case", "tiers"), mostly_long(FEW, FEW[0], FEW[2], FEW[4]), ids=few_id)
def test_a_rate_that_changes_right_after_the_step(
    case: Case, tiers: str, schedule: Callable[[Optimizer], LRScheduler], tmp_path: Path, monkeypatch: Any
) -> None:
    """No update away from the device begins before the scheduler has changed the rates for the next one."""
    case = replace(case, steps=4)
    trainer = Trainer(case.recipe, lambda model: in_groups(model, "AdamW fused"), padded=True)
    alone, wanted = schedule(trainer.optimizer), []
    for _ in range(case.steps):
        wanted.append(trainer.step())
        alone.step()

    with held_back(monkeypatch) as gate:
        everyone = threading.Barrier(case.ranks)

        def on_rank(rank: int) -> Any:
            runner = Runner(on_tiers(case, tiers, tmp_path), rank, lambda model: in_groups(model, "AdamW fused"))
            scheduler = schedule(runner.optimizer)

            def after_step() -> None:
                scheduler.step()
                everyone.wait(120)
                gate.set()

            def before_step(model: nn.Module, optimizer: Optimizer) -> None:
                everyone.wait(120)
                gate.clear()

            runner.tune, runner.after_step = before_step, after_step
            return runner.run()

        assert_reference(case, run_in_threads(case.ranks, on_rank), wanted)


def test_a_rate_in_a_tensor_and_betas_in_a_list(tmp_path: Path) -> None:
    case = Case("zero3", 2)

    def make(model: nn.Module) -> Optimizer:
        group = {"params": list(model.parameters()), "lr": torch.tensor(1e-2), "betas": [0.8, 0.9]}
        return torch.optim.AdamW([group], fused=True)

    def halve(optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.param_groups[0]["betas"][0] *= 0.9

    trainer, wanted = Trainer(case.recipe, make, padded=True), []
    for _ in range(case.steps):
        wanted.append(trainer.step())
        halve(trainer.optimizer)

    def on_rank(rank: int, tiers: str) -> Any:
        runner = Runner(on_tiers(case, tiers, tmp_path), rank, make)
        runner.after_step = lambda: halve(runner.optimizer)
        return runner.run()

    for tiers in ("cpu", "all on nvme"):
        assert_reference(case, run_in_threads(2, functools.partial(on_rank, tiers=tiers)), wanted)


class Mine(torch.optim.AdamW):
    """A user's optimizer that leaves the work to torch's."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_users_optimizer_that_calls_torchs(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        return Mine(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    for tiers in ("cpu", "all on nvme"):
        check(on_tiers(Case("zero3", 2), tiers, tmp_path), make_optimizer=make)


# -- clipping --------------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, case=lambda case: {}, tiers=tier_of_update)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize("limits", [(0.05, 0.05), (0.05, 1e6), (1e6, 1e6)], ids=["always", "every other step", "never"])
@pytest.mark.parametrize(("case", "tiers"), FEW, ids=few_id)
def test_clipping_is_that_on_the_device(
    case: Case, tiers: str, limits: tuple[float, float], precision: str, tmp_path: Path
) -> None:
    norms: dict[Case, list[list[float]]] = {}

    def clipped(case: Case) -> Ranks:
        seen = norms[case] = [[] for _ in range(case.ranks)]

        def on_rank(rank: int) -> Any:
            runner = Runner(case, rank, fused)

            def clip(model: nn.Module, optimizer: Optimizer) -> None:
                seen[rank].append(tz.clip_grad_norm_(model, limits[runner.steps_done % 2]).item())

            runner.tune = clip
            return runner.run()

        return run_in_threads(case.ranks, on_rank)

    on_device = replace(case, steps=4, **PRECISIONS[precision])
    elsewhere = on_tiers(on_device, tiers, tmp_path)
    wanted, found = clipped(on_device), clipped(elsewhere)
    assert norms[elsewhere] == norms[on_device]
    assert all(0.05 < norm < 1e6 for norm in norms[on_device][0])
    assert_same(found, wanted)


def both(case: Case, elsewhere: Case, loop: Callable[[Runner], None]) -> None:
    """`loop`, and what follows it, has the same result on the device and elsewhere."""

    def on_rank(rank: int, case: Case) -> Any:
        runner = Runner(case, rank, fused)
        loop(runner)
        return runner.run()

    base_model(case.variant)  # built here: the threads would share one random generator
    found, wanted = (run_in_threads(c.ranks, functools.partial(on_rank, case=c)) for c in (elsewhere, case))
    assert_same(found, wanted)


@pytest.mark.parametrize("tiers", mostly_long(TOGETHER, "all on nvme", "shares"))
def test_clipped_gradients_to_which_others_are_added(tiers: str, tmp_path: Path) -> None:
    """Clipped away from the device, gradients are scaled once they are used: whatever comes before that sees it."""

    def loop(runner: Runner) -> None:
        for number in range(3):
            runner.backward()
            tz.clip_grad_norm_(runner.model, 0.1)
            if number == 1:
                runner.optimizer.step()  # and the gradients stay
                tz.clip_grad_norm_(runner.model, 0.08)
                tz.clip_grad_norm_(runner.model, 0.05)

    case = Case("zero3", 2, steps=2, variant="wide")
    both(case, on_tiers(case, tiers, tmp_path), loop)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("tiers", TOGETHER)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_never_zeroed(tiers: str, mode: Any, tmp_path: Path) -> None:
    """Those of units that a step does not run are still there, and used again."""

    def loop(runner: Runner) -> None:
        for _ in range(4):
            runner.backward()
            runner.optimizer.step()

    case = Case("zero3", 2, steps=2, variant="unused")
    both(case, on_tiers(case, tiers, tmp_path, mode), loop)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("tiers", TOGETHER)
@pytest.mark.parametrize("mode", MODES)
def test_two_steps_on_the_same_gradients(tiers: str, mode: Any, tmp_path: Path) -> None:
    def loop(runner: Runner) -> None:
        runner.backward()
        for _ in range(3):
            runner.optimizer.step()

    case = Case("zero3", 2, steps=2, variant="wide")
    both(case, on_tiers(case, tiers, tmp_path, mode), loop)


# -- loss scaling ----------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("case", "tiers"), mostly_long(FEW, FEW[1], FEW[2], FEW[4]), ids=few_id)
def test_an_infinity_on_one_rank_skips_the_step(case: Case, tiers: str, mode: str, tmp_path: Path) -> None:
    case = replace(case, precision="fp16")
    trainer = Trainer(case.recipe, fused, padded=True)

    def spoil(model: nn.Module) -> None:
        grad = model.get_parameter("head.weight").grad
        if trainer.steps_done == 1 and grad is not None:
            grad[0, 0] = float("inf")

    trainer.after_backward = spoil
    wanted = [trainer.step() for _ in range(case.steps)]
    assert trainer.skipped_steps == 1

    def on_rank(rank: int) -> Any:
        runner = Runner(on_tiers(case, tiers, tmp_path, mode), rank, fused)

        def blow_up(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if rank == 1 and runner.steps_done == 1:
                output.register_hook(lambda grad: grad * float("inf"))

        runner.model.head.register_forward_hook(blow_up)
        result = runner.run()
        assert runner.optimizer.skipped_steps == 1
        assert runner.optimizer.loss_scale == FIRST_SCALE / 2
        return result

    assert_reference(case, run_in_threads(case.ranks, on_rank), wanted)


def test_gradients_that_overflow_until_the_scale_fits(tmp_path: Path) -> None:
    scaling = Precision(weight=torch.float16, compute=torch.float16, loss_scaling=LossScaling(init=2.0**22))
    case = Case("zero3", 2, precision="fp16", dtypes=scaling, steps=8)
    trainer = Trainer(case.recipe, fused, padded=True)
    trainer.scale = 2.0**22
    wanted = [trainer.step() for _ in range(case.steps)]
    assert 0 < trainer.skipped_steps < 6
    for tiers in ("cpu-all", "all on nvme"):
        assert_reference(case, train(on_tiers(case, tiers, tmp_path)), wanted)


# -- time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tiers"), mostly_long(FEW, FEW[1], FEW[3]), ids=few_id)
def test_delays_change_no_bit(case: Case, tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, reads and writes take longer than they should, each time by another bit."""
    choose, lock = random.Random(tiers), threading.Lock()

    def late(original: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any) -> Any:
            with lock:
                delay_s = choose.choice([0.0, 0.0, 0.001, 0.003])
            time.sleep(delay_s)
            return original(*args)

        return delayed

    for owner, name in ((stepper, "unhooked_step"), (SwapFile, "read"), (SwapFile, "write")):
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
    check(on_tiers(replace(case, variant="wide", steps=4), tiers, tmp_path, MODES[len(tiers) % 3]))


@pytest.mark.parametrize("tiers", ["nvme", "all on nvme"])
def test_what_is_still_being_written_is_not_read(tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring with more places than there are cells: nothing else waits for the writes of the update before."""
    write = SwapFile.write
    monkeypatch.setattr(SwapFile, "write", lambda *args: (time.sleep(0.1), write(*args))[1])
    check(on_tiers(Case("zero3", 2, steps=3), tiers, tmp_path, block_mib=1, depth=32))


@pytest.mark.cover(turns=2)
@pytest.mark.parametrize("optim", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("grad", ["device", "cpu", "nvme"])
@pytest.mark.parametrize("weight", ["device", "cpu", "nvme"])
def test_every_triple_of_tiers(weight: str, grad: str, optim: str, tmp_path: Path) -> None:
    case, tiers = Case("zero3", 2, steps=3), (weight, grad, optim)
    moved = replace(case, tiers=tuple(zip(STATES, tiers, strict=True)))
    mode: Any = MODES[sum(map(ord, "".join(tiers))) % 3]
    offload = tz.Offload(tmp_path, mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
    ranks = train(replace(moved, offload=offload.used_under(moved.placed)))
    assert_reference(case, ranks, expected(case))
