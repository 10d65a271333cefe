"""The numeric contract beside the sums: clipping, denominators, loss scaling, dtypes on the wire, replicas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import LossScaling, Precision, engine_of
from terrazzo.engine.optim.clipping import norms
from tests.engine.parity import (
    Case,
    Runner,
    Trace,
    assemble,
    assert_parity,
    assert_same_bits,
    axes,
    bits,
    check,
    gradients_of,
    run_on_threads,
)
from tests.engine.reference import FIRST_SCALE, Sums, Trainer, adamw, add_up, reference
from tests.helpers.fake import fake_group
from tests.helpers.threads import run_in_threads

PLANS = [
    *(Case(plan, 3) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 2, replicas=2) for plan in ("zero3", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")),
]


def plan_id(case: Case) -> str:
    return f"{case.plan}-{'2x2' if case.replicas else case.shards}"


def by_adamw(model: nn.Module) -> Optimizer:
    return adamw(model.parameters())


# -- clipping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("numel", [5000, 8192, 3_000_000])
def test_the_norm_of_many_elements_is_as_exact_as_that_of_few(numel: int, kind: float) -> None:
    """`torch.linalg.vector_norm` itself is 4e-5 too small at a million elements, and 3e-3 at fifty."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    with fake_group(1):
        sharding = engine_of(tz.shard(nn.Linear(2, 2), None)[0]).sharding
        found = norms([[values]], sharding, kind)
    assert found.item() == pytest.approx(torch.linalg.vector_norm(values.double(), kind).item(), rel=2e-6)


@pytest.mark.cover(strength=1, turns=2, case=axes)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("case", PLANS, ids=plan_id)
def test_clipping_is_torchs_own_on_whole_gradients(case: Case, norm_type: float) -> None:
    case = replace(case, variant="unused", steps=1)
    wanted: list[Tensor] = []
    trainer = Trainer(case.recipe, by_adamw)
    trainer.after_backward = lambda model: wanted.append(
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
    )
    expected = trainer.step()

    def on_rank(rank: int) -> tuple[Tensor, Trace]:
        norms: list[Tensor] = []
        runner = Runner(case, rank)
        runner.tune = lambda model, optimizer: norms.append(tz.clip_grad_norm_(model, 0.05, norm_type))
        trace = runner.step()
        return norms[0], trace

    ranks = run_in_threads(case.ranks, on_rank)
    for norm, _ in ranks:
        assert norm.item() == ranks[0][0].item(), "ranks disagree"
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, wanted[0], rtol=1e-6, atol=0.0)
    assert wanted[0] > 0.05, "nothing was clipped"
    grads = assemble([trace.grads for _, trace in ranks], "gradients")
    weights = assemble([trace.weights for _, trace in ranks], "weights")
    assert grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-6, atol=0.0)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)


HOSTED = Case("zero2", 2, tiers=(("grad", "cpu"), ("optim", "cpu")), offload=tz.Offload(step="synchronous"))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("case", [Case("zero0"), Case("zero3", 3), HOSTED], ids=["zero0", "zero3", "zero2@cpu"])
def test_clipped_gradients_are_torchs_to_the_bit(case: Case, precision: str) -> None:
    """Of the same norm, with which torch multiplies gradients of 16 bits unrounded."""
    case = replace(case, precision=precision, steps=1)

    def by_sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def on_rank(rank: int) -> tuple[Tensor, Trace]:
        norms: list[Tensor] = []
        runner = Runner(case, rank, by_sgd)
        runner.tune = lambda model, optimizer: norms.append(tz.clip_grad_norm_(model, 0.05))
        trace = runner.step()
        return norms[0], trace

    ranks = run_in_threads(case.ranks, on_rank)
    trainer, norm = Trainer(case.recipe, by_sgd), ranks[0][0]
    trainer.after_backward = lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    expected = trainer.step()
    assert norm > 0.05, "nothing was clipped"
    assert_same_bits(assemble([trace.grads for _, trace in ranks], "gradients"), expected.grads, "gradients")
    assert_same_bits(assemble([trace.weights for _, trace in ranks], "weights"), expected.weights, "weights")


def test_a_norm_below_the_limit_changes_no_bit() -> None:
    case = Case("zero3", 3)
    ranks = run_on_threads(case, tune=lambda model, optimizer: tz.clip_grad_norm_(model, 1e6))
    assert_parity(case, ranks, reference(case.recipe))


# -- denominators ----------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, case=axes)
@pytest.mark.parametrize("denominator", [1.0, 0.3])
@pytest.mark.parametrize("case", PLANS, ids=plan_id)
def test_one_division_by_the_chosen_denominator(case: Case, denominator: float) -> None:
    check(replace(case, denominator=denominator, micro_batches=2, steps=2))


# -- loss scaling ----------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1, turns=2, case=axes)
@pytest.mark.parametrize("case", [Case("zero0"), Case("zero1"), Case("zero3", 3), Case("hfsdp", 2, 2)], ids=plan_id)
def test_an_overflow_on_one_rank_skips_the_step_on_all(case: Case) -> None:
    """The reference's gradient is made infinite in the same step, in one element."""
    case = replace(case, precision="fp16")
    trainer = Trainer(case.recipe, by_adamw)

    def spoil_whole(model: nn.Module) -> None:
        if trainer.steps_done == 1:
            grad = model.get_parameter("blocks.1.up.weight").grad
            assert grad is not None
            grad[-1, -1] = float("inf")

    trainer.after_backward = spoil_whole
    expected = [trainer.step() for _ in range(case.steps)]
    assert trainer.skipped_steps == 1

    def on_rank(rank: int) -> Any:
        runner = Runner(case, rank)

        def spoil_part(model: nn.Module, optimizer: Optimizer) -> None:
            if runner.steps_done == 1:
                for bucket in engine_of(model).trainable():
                    own = bucket.master.range
                    for slot in bucket.slots:
                        if slot.name == "blocks.1.up.weight" and own.start < slot.range.stop <= own.stop:
                            whole = bucket.gradient.finished.read()
                            assert whole is not None
                            whole[slot.range.stop - 1 - own.start] = float("inf")

        runner.tune = spoil_part
        result = runner.run()
        assert runner.optimizer.skipped_steps == 1
        assert runner.optimizer.loss_scale == FIRST_SCALE / 2 == trainer.scale
        return result

    assert_parity(case, run_in_threads(case.ranks, on_rank), expected)


def fp16(**settings: Any) -> Precision:
    return Precision(weight=torch.float16, compute=torch.float16, loss_scaling=LossScaling(**settings))


def check_scaling(case: Case, init: float, growth_interval: int) -> Trainer:
    """Train with a given scale, and compare with the reference, whose scale grows here."""
    trainer = Trainer(case.recipe, by_adamw)
    trainer.scale = init
    expected, good_steps = [], 0
    for _ in range(case.steps):
        skipped = trainer.skipped_steps
        expected.append(trainer.step())
        good_steps = good_steps + 1 if trainer.skipped_steps == skipped else 0
        if good_steps and good_steps % growth_interval == 0:
            trainer.scale *= 2
    case = replace(case, dtypes=fp16(init=init, interval=growth_interval))
    assert_parity(case, run_on_threads(case), expected)
    return trainer


def test_gradients_that_overflow_in_fp16_are_skipped_until_the_scale_fits() -> None:
    trainer = check_scaling(replace(Case("zero3", 3), precision="fp16", steps=8), 2.0**22, 100)
    assert 0 < trainer.skipped_steps < 6


def test_the_scale_grows_after_good_steps() -> None:
    trainer = check_scaling(replace(Case("zero1", 2), precision="fp16", steps=5), 2.0**10, 2)
    assert trainer.scale == 2.0**12
    assert trainer.skipped_steps == 0


# -- dtypes on the wire ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", ["", "SR"])
def test_a_bf16_wire_is_summed_in_fp32(each: str) -> None:
    """Sent as bf16, added in fp32: one rounding per rank's gradient, and none of the sum."""
    case = Case("zero3", 3, dtypes=Precision(reduce=torch.bfloat16), micro_batches=2, local=not each)
    parts = _gradients_of_ranks(case)
    found = assemble(run_in_threads(3, lambda rank: _one_backward(case, rank)), "gradients")
    for name, value in found.items():
        sums = Sums(1, 3, each)
        if each:
            rounded = [[part[name].bfloat16() for part in micro] for micro in parts]
        else:
            local = [(parts[0][rank][name] + parts[1][rank][name]).bfloat16() for rank in range(3)]
            rounded = [local]
        widened = [[part.float() for part in micro] for micro in rounded]
        total = add_up(widened, sums, torch.zeros(()))
        assert total is not None
        assert torch.equal(bits(value), bits((total / 3).flatten())), name


def test_an_all_reduce_over_a_bf16_wire_rounds_its_result_once_more() -> None:
    """Its sum, divided in fp32, travels back as bf16: all ranks must hold the same gradient."""
    case = Case("zero0", 3, dtypes=Precision(reduce=torch.bfloat16))
    (parts,) = _gradients_of_ranks(case)
    found = assemble(run_in_threads(3, lambda rank: _one_backward(case, rank)), "gradients")
    for name, value in found.items():
        widened = [part[name].bfloat16().float() for part in parts]
        mean = (widened[0] + widened[1] + widened[2]) / 3
        assert torch.equal(value.float(), mean.bfloat16().float().flatten()), name


@pytest.mark.parametrize("case", [Case("zero1", 3), Case("zero3", 3), Case("hfsdp", 2, 2)], ids=plan_id)
def test_bf16_moments_are_widened_for_each_update_and_rounded_after_it(case: Case) -> None:
    trainer = Trainer(case.recipe, by_adamw)
    expected = []
    for _ in range(case.steps):
        step = trainer.step()
        for state in trainer.optimizer.state.values():
            state.update({kind: value.bfloat16().float() for kind, value in state.items() if kind != "step"})
        step.states = {
            (name, kind): value if kind == "step" else value.bfloat16() for (name, kind), value in step.states.items()
        }
        expected.append(step)
    case = replace(case, dtypes=Precision(moments=torch.bfloat16))
    assert_parity(case, run_on_threads(case), expected)


def _one_backward(case: Case, rank: int) -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    Runner(case, rank, tune=lambda model, optimizer: kept.append(gradients_of(model))).step()
    return kept[0]


def _gradients_of_ranks(case: Case) -> list[list[dict[str, Tensor]]]:
    """fp32 gradients [micro-batch][rank] of the first step."""
    trainer = Trainer(case.recipe, by_adamw)
    return [[trainer.backward(rank, micro) for rank in range(case.ranks)] for micro in range(case.micro_batches)]


# -- between plans ---------------------------------------------------------------------------------------------


def test_plans_differ_only_by_their_order_of_sums() -> None:
    """Four ranks as 4 and as 2x2, adding up micro-batches or reducing each: within 1e-6 of each other after 5 steps."""
    orders = [Sums(1, 4, ""), Sums(1, 4, "SR"), Sums(2, 2, ""), Sums(2, 2, "S"), Sums(2, 2, "SR")]
    recipe = Case("zero3", 4, micro_batches=3).recipe
    first, *others = [reference(replace(recipe, sums=sums))[-1].weights for sums in orders]
    for weights in others:
        for name, weight in first.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6)
