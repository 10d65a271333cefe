"""Gradients sent in blocks: each bit as in a single process that rounds whole matrices, in memory that is promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import Precision, engine_of
from terrazzo.errors import BadInput
from tests.engine.models import base_model
from tests.engine.offload import runs
from tests.engine.parity import CUSTOM, Case, Runner, Trace, assemble, assert_same_bits, axes, check, with_feature
from tests.engine.reference import Trainer, adamw
from tests.engine.toys import Net, batch, full_parameters, loss_of, on_ranks, sharded
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads

PLANS = [
    *(Case(plan, 3) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 2, replicas=2) for plan in ("zero3", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
    Case("hybrid_shard", 2, replicas=3),
]
FEATURES = (
    "plain",
    "frozen",
    "tied",
    "unused_and_reordered",
    "accumulating",
    "accumulating_locally",
    "checkpointed",
)
SUMMED_OTHERWISE = ("tied", "unused_and_reordered", "accumulating", "accumulating_locally")
"""Of which gradients come in other numbers or at other times; the rest change nothing of what is sent."""
SENT = [(name, form) for name in ("fp32", "bf16", "bf16-pure", "fp16") for form in ("int8", "int4")]


def sending(form: str, name: str = "bf16", **others: Any) -> Precision:
    return replace(Precision.named(name), quantized_reduce=form, **others)


@pytest.mark.cover(
    strength=1, case=axes, sent=lambda sent: dict(enumerate(sent))
)  # places and features meet in test_parity
@pytest.mark.parametrize("feature", mostly_long(FEATURES, *SUMMED_OTHERWISE))
@pytest.mark.parametrize("sent", SENT, ids="-".join)
@pytest.mark.parametrize("case", PLANS, ids=str)
def test_every_plan_is_bitwise_the_single_process(case: Case, sent: tuple[str, str], feature: str) -> None:
    """Each rank's gradient is rounded once, and what all ranks get is rounded once more."""
    name, form = sent
    check(replace(with_feature(case, feature), precision=name, dtypes=sending(form, name)))


@pytest.mark.long  # the same with residuals: test_error_feedback
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("tiers", ["cpu-all", "nvme", "all on nvme", "shares"])
@pytest.mark.parametrize("case", [Case("zero1", 3), Case("zero3", 2), Case("hybrid_shard", 2, replicas=2)], ids=str)
def test_every_tier_is_bitwise_the_single_process(case: Case, tiers: str, name: str, tmp_path: Path) -> None:
    runs.check(runs.on_tiers(replace(case, precision=name, dtypes=sending("int4", name)), tiers, tmp_path))


# -- what a loop does with them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case("zero3", 3), Case("hybrid_shard", 2, replicas=2)], ids=str)
def test_what_is_clipped_are_the_sums(case: Case) -> None:
    case = replace(case, precision="bf16", dtypes=sending("int4"))
    base_model(case.variant)

    def on_rank(rank: int) -> tuple[Tensor, Trace]:
        runner, norms = Runner(case, rank), list[Tensor]()
        runner.tune = lambda model, optimizer: norms.append(tz.clip_grad_norm_(model, 0.05))
        trace = runner.step()
        return norms[0], trace

    ranks = run_in_threads(case.ranks, on_rank)
    trainer, norm = Trainer(case.recipe, lambda model: adamw(model.parameters())), ranks[0][0]
    trainer.after_backward = lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    expected = trainer.step()
    assert norm > 0.05, "nothing was clipped"
    assert_same_bits(assemble([trace.weights for _, trace in ranks], "weights"), expected.weights, "weights")


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("plan", ["zero0", "zero3", "hybrid_shard"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(plan: str, bad: float, form: str) -> None:
    """From one element on one rank: no norm is finite, and the loss scale's check skips the step."""

    def spoil(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: grad.masked_fill(torch.arange(grad.numel()).view_as(grad) == 7, bad))

    def body(rank: int) -> tuple[bool, int, bool]:
        model, optimizer = sharded(Net(width=37), plan, 4, precision=sending(form, "fp16"))
        before = full_parameters(model)
        if rank == 3:
            model.blocks[1].up.register_forward_hook(spoil)
        loss_of(model, batch(0, rank)).backward()
        finite = bool(torch.isfinite(tz.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        after = full_parameters(model)
        return finite, optimizer.skipped_steps, all(torch.equal(before[name], after[name]) for name in before)

    assert on_ranks(4, body) == [(False, 1, True)] * 4


# -- bytes and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "block_bytes"), [("int8", 256 + 4), ("int4", 128 + 4)])
def test_a_gradient_is_sent_in_codes_and_a_scale_for_each_256_elements(form: str, block_bytes: int) -> None:
    """Of two matrices of 64 × 64 on four ranks: of one axis, and of two groups, between which it goes both ways."""

    def sent_bytes(plan: str) -> list[dict[tuple[str, str], int]]:
        def body(rank: int) -> dict[tuple[str, str], int]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            model, _ = tz.shard(
                nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))),
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                plan,
                units=[nn.Linear],
                precision=sending(form, reduce=torch.bfloat16),
                mesh=mesh if plan == "hybrid_shard" else None,
            )
            model(torch.ones(1, 64)).sum().backward()
            return {key: times.sent_bytes for key, times in engine_of(model).traffic.times.items()}

        return on_ranks(4, body)

    blocks = 2 * 64 * 64 // 256
    for sent in sent_bytes("zero3"):
        assert sent["dp_shard", "reduce_scatter"] == blocks * 3 // 4 * block_bytes
    for sent in sent_bytes("hybrid_shard"):
        assert sent["dp_shard", "reduce_scatter"] == 64 * 64 * 2  # the half that is not its own, in bf16
        assert sent["dp_replicate", "reduce_scatter"] == blocks // 4 * block_bytes
        assert sent["dp_replicate", "all_reduce"] == blocks // 4 * block_bytes
        assert ("dp_replicate", "all_gather") not in sent, "waits for sums would count as waits for weights"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"quantized_reduce is 'fp8'\..* Use one of int8, int4"):
        Precision(quantized_reduce="fp8")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="quantized_reduce int8 of gradients that are kept in fp64"):
        Precision(accumulate="fp64", quantized_reduce="int8")  # type: ignore[arg-type]
    assert str(sending("int4")).endswith(", gradients sent in int4")
