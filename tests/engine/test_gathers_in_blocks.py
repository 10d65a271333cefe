"""Weights sent in 8 bits: each bit as in a single process that rounds whole matrices, in memory that is promised."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import Precision, WireFormat, engine_of, whole_weights
from terrazzo.engine.buckets.weights import weight_gathers
from terrazzo.engine.buckets.weights.weight_gathers import update_way
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.weight_wire import BlockWire, DtypeWire, WeightWire
from terrazzo.errors import BadInput
from tests.engine.narrow import as_sent
from tests.engine.offload import runs
from tests.engine.parity import CUSTOM, Case, assert_same_bits, axes, check, with_feature
from tests.engine.toys import Net, batch, full_parameters, loss_of, on_ranks, sharded, train
from tests.helpers.fake import fake_group

PLANS = [
    *(Case(plan, 3) for plan in ("zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 2, replicas=2) for plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
]
FEATURES = ("plain", "frozen", "tied", "unused_and_reordered", "accumulating", "checkpointed")
SENT = [(name, form) for name in ("fp32", "bf16", "bf16-pure", "fp16") for form in ("int8", "fp8")]


def gathering(form: str, name: str = "bf16", **others: Any) -> Precision:
    return replace(Precision.named(name), gather=form, **others)


@pytest.mark.cover(strength=1, turns=2, case=axes)  # places and features meet in test_parity
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sent", SENT, ids="-".join)
@pytest.mark.parametrize("case", PLANS, ids=str)
def test_every_plan_is_bitwise_the_single_process(case: Case, sent: tuple[str, str], feature: str) -> None:
    """Master weights are never rounded, and all ranks compute with the same."""
    name, form = sent
    check(replace(with_feature(case, feature), precision=name, dtypes=gathering(form, name)))


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("tiers", ["cpu-all", "nvme", "all on nvme", "shares"])
@pytest.mark.parametrize("case", [Case("zero1", 3), Case("zero3", 2), Case("hpz", 2, replicas=2)], ids=str)
def test_every_tier_is_bitwise_the_single_process(case: Case, tiers: str, name: str, tmp_path: Path) -> None:
    runs.check(runs.on_tiers(replace(case, precision=name, dtypes=gathering("int8", name)), tiers, tmp_path))


# -- what is seen and written ----------------------------------------------------------------------------------------


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in whole_weights(model)}


@pytest.mark.parametrize("plan", ["zero2", "zero3", "hpz"])
def test_what_is_written_is_kept_and_all_else_is_not_rounded(plan: str) -> None:
    """Of a matrix of which two elements are written, one of them the largest, masters of the others keep every bit."""
    base = Net(width=37)

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = sharded(base, plan, 4, precision=gathering("int8"))
        train(model, optimizer, 2, rank)
        before = masters(model)
        with torch.no_grad(), tz.gathered(model, write=True) as parameters:
            parameters["blocks.1.up.weight"][5, 7] = 9.0
            parameters["blocks.1.up.weight"][20, 3] = -0.125
        after = masters(model)
        return before, after, full_parameters(model)

    for before, after, seen in on_ranks(4, body):
        before["blocks.1.up.weight"][5, 7], before["blocks.1.up.weight"][20, 3] = 9.0, -0.125
        assert_same_bits(after, before, "masters")
        for name, value in after.items():
            wanted = as_sent(value.bfloat16(), "int8")
            if plan == "zero3" or name != "blocks.1.up.weight":  # those at rest are as they were written
                assert torch.equal(seen[name], wanted), name


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_norms_are_of_the_weights_that_are_computed_with(plan: str) -> None:
    base = Net(width=37)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model, _ = sharded(base, plan, 2, precision=gathering("int8"))
        norm = model.blocks[0].up.weight.float().norm()
        return norm, full_parameters(model)["blocks.0.up.weight"].float().norm()

    for norm, wanted in on_ranks(2, body):
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("plan", "name"), [("zero3", "bf16"), ("zero2", "fp32")])
def test_a_run_goes_on_from_master_weights(plan: str, name: str) -> None:
    """Saved under one plan and gone on with under another."""
    base, compute = Net(width=37), Precision.named(name).compute

    def body(rank: int) -> tuple[dict[str, Tensor], ...]:
        model, optimizer = sharded(base, plan, precision=gathering("int8", name))
        train(model, optimizer, 2, rank)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        other, _ = sharded(Net(width=37), "zero2", precision=gathering("int8", name))
        other.load_state_dict(state)
        return masters(model), masters(other), full_parameters(other)

    for first, second, seen in on_ranks(2, body):
        assert_same_bits(second, first, "masters")
        for name, value in first.items():
            assert torch.equal(seen[name], as_sent(value.to(compute), "int8")), name


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(WireFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e3, 1.0, 1e-5, 1e-7, 1e-38])
def test_what_has_been_sent_once_is_the_same_when_it_is_sent_again(
    form: WireFormat, dtype: torch.dtype, size: float
) -> None:
    values = (torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    once = form.blocks.as_decoded(values, dtype)
    assert torch.equal(form.blocks.as_decoded(once, dtype), once)
    if size == 1.0:
        assert torch.equal(once.view(1, -1), as_sent(values.view(1, -1), form.value))
        error = (once.double() - values.double()).norm() / values.double().norm()
        assert error < {WireFormat.INT8: 0.0075, WireFormat.FP8: 0.0265, WireFormat.INT4: 0.13}[form]


@pytest.mark.parametrize("form", list(WireFormat))
@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FFFFFFF, 0x7F800001])
def test_a_value_that_is_not_finite_makes_its_block_not_finite(form: WireFormat, bits: int) -> None:
    values = torch.ones(768)
    values.view(torch.int32)[300] = bits
    seen = form.blocks.as_decoded(values, torch.float32)
    assert not seen[256:512].isfinite().any()
    torch.testing.assert_close(seen[:256], values[:256], rtol=1e-5, atol=0)
    torch.testing.assert_close(seen[512:], values[512:], rtol=1e-5, atol=0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match=r"gather is 'int4'\..* Use one of int8, fp8"):
        Precision(gather="int4")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="gather int8 of weights that are computed with in fp64"):
        Precision(*[torch.float64] * 6, gather="int8")  # type: ignore[arg-type]
    assert str(gathering("int8")).endswith(", gathered in int8")


class LowBits(WeightWire):
    """Sends what is computed with, but for the bits of it that are in the mask."""

    rounds = True

    def as_seen(self, values: Tensor, compute: torch.dtype) -> Tensor:
        return values.to(compute).view(torch.int32).bitwise_and(-0x10000).view(torch.float32)

    def sent_bytes(self, numel: int) -> float:
        return 4.0 * numel


@pytest.mark.parametrize(("plan", "refused"), [("zero3", "Weights cannot be"), ("zero2", "New weights cannot")])
def test_what_rounds_is_never_sent_as_if_it_did_not(plan: str, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire of its own that has no way yet is refused before anything is built."""
    monkeypatch.setattr(BucketSpec, "weight_wire", LowBits())
    if plan == "zero2":
        monkeypatch.setitem(weight_gathers._GATHERS, LowBits, weight_gathers._GATHERS[DtypeWire])
    with fake_group(2), pytest.raises(NotImplementedError, match=refused):
        sharded(Net(width=37), plan)


def test_values_of_any_wire_that_rounds_are_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights at rest, shown ones and what is adopted ask the wire, whatever it is."""
    monkeypatch.setattr(BucketSpec, "weight_wire", LowBits())
    for ways in (weight_gathers._GATHERS, weight_gathers._UPDATES):
        monkeypatch.setitem(ways, LowBits, ways[DtypeWire])
    base = Net(width=37)
    weight = base.blocks[0].up.weight.detach()
    wanted = LowBits().as_seen(weight, torch.float32)
    assert not torch.equal(wanted, weight)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        at_rest, _ = sharded(base, "zero2", 2)
        split, _ = sharded(base, "zero3", 2)
        return full_parameters(at_rest)["blocks.0.up.weight"], split.blocks[0].up.weight.norm()

    for seen, norm in on_ranks(2, body):
        assert torch.equal(seen, wanted)
        torch.testing.assert_close(norm, wanted.norm(), rtol=1e-6, atol=0)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_matrix_is_sent_in_a_byte_and_a_sixty_fourth_for_each_element() -> None:
    base = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def body(rank: int) -> int:
        optimizer = torch.optim.SGD
        model, _ = tz.shard(
            nn.Sequential(*(nn.Linear(64, 64) for _ in base)),
            lambda parameters: optimizer(parameters, lr=0.1),
            "zero3",
            units=[nn.Linear],
            precision=gathering("int8"),
        )
        with torch.no_grad():
            model(torch.ones(1, 64))
        return engine_of(model).traffic.bytes["all_gather"]

    biases = 256 * 2  # 64 elements, padded to one block of this rank's; in bf16
    assert on_ranks(2, body) == [2 * (64 * 64 // 2 * 260 // 256 + biases)] * 2


def test_sizes_are_those_of_the_format() -> None:
    """A block of 4 bits is 128 bytes of codes and 4 of a scale: promised, sent, and seen by the other rank."""
    base = nn.Linear(64, 64, bias=False)
    half = BlockWire(WireFormat.INT4)
    assert half.sent_bytes(512) == half.message_bytes(512) == 2 * 132

    def body(rank: int) -> tuple[int, Tensor]:
        model, _ = tz.shard(
            copy.deepcopy(base),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "zero3",
            precision=gathering("int8", "fp32"),
        )
        engine = engine_of(model)
        [bucket] = engine.units[0].buckets
        whole = bucket.space.empty((), torch.float32)
        own = whole.narrow(bucket.spec.weight_axes).data
        own.copy_(base.weight.detach().view(2, -1)[rank])
        engine.traffic.reset()
        bucket.spec.update_wire = half
        Transfer(update_way(bucket.spec, bucket.ledger)(whole, bucket.spec.weight_axes)).finish()
        return engine.traffic.bytes["all_gather"], whole.data.clone()

    wanted = as_sent(base.weight.detach().view(1, -1), "int4").view(-1)
    for sent_bytes, seen in on_ranks(2, body):
        assert sent_bytes == 64 * 64 // 2 // 256 * 132
        assert torch.equal(seen, wanted)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"plan": "zero3", "precision": gathering("int8")}, "precision: gather 'int8'"),
        ({"plan": "zero2", "diloco": tz.DiLoCo(2, traffic="int8")}, "diloco: traffic 'int8'"),
    ],
    ids=["gathers", "outer steps"],
)
@pytest.mark.parametrize("attached", [False, True])
def test_an_optimizer_that_moves_padding_is_refused_where_it_would_enter_the_scale_of_a_block(
    options: dict[str, Any], what: str, attached: bool
) -> None:
    """0 / 0 without eps: all weights were NaN after two steps, without a word."""
    model = Net(width=37)
    optimizer = torch.optim.AdamW(model.parameters(), eps=0)
    with fake_group(2):
        if "diloco" in options:
            options = {**options, "mesh": tz.mesh(dp_replicate=2, device="cpu")}
        if attached:
            tz.shard(model, None, **options)
        with pytest.raises(BadInput, match=f"{what}, .* NaN, where eps is 0"):
            tz.attach(model, optimizer) if attached else tz.shard(model, optimizer, **options)


def test_weights_that_are_nan_are_not_taken_for_edited() -> None:
    """NaN is no other number than itself; who reads `.data` has the weights compared with what they were."""

    def body(rank: int) -> None:
        model, optimizer = tz.shard(Net(), lambda p: torch.optim.AdamW(p, eps=0), "zero1", precision="bf16")
        assert [parameter.data for parameter in model.parameters()]
        for step in range(3):
            first, second = (loss_of(model, batch(number, rank)) for number in (step, step + 1))
            (first * second).backward()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(2, body)
