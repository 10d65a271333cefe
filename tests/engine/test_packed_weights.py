"""Frozen matrices in 4 bits: each bit as in a single process that rounds whole tensors, wherever they rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.packed_members import cuts_blocks
from terrazzo.errors import BadInput, Misuse
from tests.engine import toys
from tests.engine.census import census, live_bytes
from tests.engine.four_bits import rounded
from tests.engine.models import IN_FOUR_BITS, base_model
from tests.engine.offload import runs
from tests.engine.parity import CUSTOM, Case, Ranks, assert_parity, assert_same_bits, axes, run_on_threads, with_feature
from tests.engine.reference import CASTS, Step, reference
from tests.helpers.cover import mostly_long, places
from tests.helpers.fake import fake_group

CASES = [
    *(Case(plan, shards) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op") for shards in (1, 3)),
    *(Case(plan, 2, replicas=2) for plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
]


FORMS = [form.value for form in FrozenFormat]


def in_four_bits(case: Case, form: str, name: str = "fp32") -> Case:
    """A case whose model has values that the format holds, so that keeping them in it changes none."""
    return replace(case, variant=form, precision=name, dtypes=replace(tz.Precision.named(name), frozen=form))


def values(form: str) -> dict[str, Tensor]:
    """What is kept in 4 bits, flat, fp32."""
    model = base_model(form)
    return {name: model.get_parameter(name).detach().flatten() for name in IN_FOUR_BITS}


def check(case: Case, ranks: Ranks, assert_all: Callable[..., None], steps: list[Step]) -> None:
    """Each bit as in the plain reference; what is kept in 4 bits is shown in bf16, and computed with in any dtype."""
    kept, compute = values(case.variant), CASTS[case.precision][0]
    shown = {name: value.bfloat16() for name, value in kept.items()}
    for _, parameters in ranks:
        found = {name: parameters[name] for name in IN_FOUR_BITS}
        assert_same_bits(found, {name: value.to(compute) for name, value in kept.items()}, "in 4 bits")
        parameters.update({name: value.to(compute) for name, value in shown.items()})
    assert_all(case, ranks, [replace(step, weights={**step.weights, **shown}) for step in steps])


@pytest.mark.cover(case=axes, strength=1, turns=2)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_is_bitwise_the_single_process(case: Case, form: str, name: str) -> None:
    case = in_four_bits(case, form, name)
    check(case, run_on_threads(case), assert_parity, reference(case.recipe))


@pytest.mark.cover(case=axes, strength=1, turns=2)
@pytest.mark.parametrize(
    "feature", ["accumulating", "accumulating_locally", "checkpointed", "checkpointed_selectively"]
)
@pytest.mark.parametrize("case", [case for case in CASES if case.ranks > 1], ids=str)
def test_every_feature_is_bitwise_the_single_process(case: Case, feature: str) -> None:
    case = in_four_bits(with_feature(case, feature), "nf4", "bf16")
    check(case, run_on_threads(case), assert_parity, reference(case.recipe))


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("tiers", ["weight on cpu", "cpu-all", "weight on nvme", "nvme-all"])
@pytest.mark.parametrize("case", [Case("zero2", 3), Case("zero3", 2), Case("hpz", 2, replicas=2)], ids=str)
def test_every_tier_is_bitwise_the_single_process(case: Case, tiers: str, tmp_path: Path) -> None:
    case = runs.on_tiers(in_four_bits(case, "nf4"), tiers, tmp_path, block_mib=1)
    check(case, runs.train(case), runs.assert_reference, runs.by_hand(case.recipe))


def test_a_step_of_a_unit_in_many_tiles_and_cells_is_that_of_whole_weights(tmp_path: Path) -> None:
    """400 x 801 elements are five tiles of a CPU, and both matrices three cells in files."""
    torch.manual_seed(0)
    base = toys.Net(width=400, depth=1)
    base.blocks.requires_grad_(False)
    with torch.no_grad():
        for layer in (base.blocks[0].up, base.blocks[0].down):
            layer.weight.copy_(rounded(layer.weight, "nf4"))

    def body(plan: str, frozen: str | None) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        settings = {"offload": tz.Offload(path=tmp_path, block_mib=1, direct=False)} if "nvme" in plan else {}
        precision = tz.Precision(frozen=frozen)  # type: ignore[arg-type]
        model, optimizer = tz.shard(model, optimizer, plan, precision=precision, units=["Block"], **settings)
        toys.train(model, optimizer, 2, 0)
        return toys.full_parameters(model)

    wanted = toys.on_ranks(2, lambda rank: body("zero3", None))[0]
    for plan in ("zero3", "zero0", "zero3@nvme-all"):
        toys.assert_equal(toys.on_ranks(2, lambda rank, plan=plan: body(plan, "nf4"))[0], wanted)


# -- codes ---------------------------------------------------------------------------------------------------------


def through(value: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """The bytes of a matrix, and what comes back of it, in fp32 that bf16 holds."""
    kind = FrozenFormat(form)
    flat = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % kind.blocks.numel))
    packed = torch.zeros(kind.blocks.size_bytes(flat.numel()), dtype=torch.uint8)
    kind.blocks.encode(flat, packed)
    return packed, kind.blocks.decode(packed)[: value.numel()].view(value.shape).bfloat16().float()


def subjects() -> dict[str, Tensor]:
    torch.manual_seed(0)
    blocks = torch.randn(600, 64)
    return {
        "normal": torch.randn(70, 130),
        "of many sizes": blocks * torch.exp(4 * torch.randn(600, 1)),
        "zeros among them": blocks * (torch.rand(600, 1) > 0.5),
        "tiny beside large": blocks * torch.where(torch.arange(600) % 7 == 0, 1.0, 1e-9)[:, None],
        "levels of a scale": rounded(torch.randn(9, 64), "nf4"),
    }


@pytest.mark.parametrize("kind", subjects())
@pytest.mark.parametrize("form", FORMS)
def test_values_are_rounded_as_plainly_written(form: str, kind: str) -> None:
    value = subjects()[kind]
    packed, kept = through(value, form)
    assert torch.equal(kept, rounded(value, form))
    again, same = through(kept.bfloat16().float(), form)
    assert torch.equal(same, kept)
    assert form == "nf4-double" or torch.equal(again, packed)  # a block of zeros may have had a scale


def test_bytes_of_an_element() -> None:
    assert FrozenFormat.NF4.itemsize * 8 == 4.25
    assert round(FrozenFormat.NF4_DOUBLE.itemsize * 8, 3) == 4.126


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(odd: float, form: str) -> None:
    value = torch.randn(300, 64)
    value[1, 5] = odd
    _, kept = through(value, form)
    assert not kept[1].isfinite().all()
    assert form == "nf4-double" or torch.equal(kept[2:], rounded(value[2:], form))


def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    value = torch.randn(96, 128)
    theirs, state = functional.quantize_4bit(value, quant_type="nf4", blocksize=64)
    packed, kept = through(value, "nf4")
    assert torch.equal(packed.view(-1, 34)[:, :32].flatten(), theirs.flatten())
    wanted = functional.dequantize_4bit(theirs, state).bfloat16()
    assert ((kept.bfloat16().view(torch.int16) - wanted.view(torch.int16)).abs() <= 1).all()


# -- memory and traffic ----------------------------------------------------------------------------------------------


def frozen_net(width: int = 40) -> toys.Net:
    """Of which the blocks' matrices are frozen, and biases, embedding and head are trained."""
    torch.manual_seed(0)
    model = toys.Net(width=width)
    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.weight.requires_grad_(False)
    return model


def shard_frozen(
    base: nn.Module, plan: str, frozen: str = "nf4", name: str = "bf16", **options: Any
) -> tuple[Any, Any]:
    model = copy.deepcopy(base)
    optimizer = toys.adamw([p for p in model.parameters() if p.requires_grad])
    precision = replace(tz.Precision.named(name), frozen=frozen)
    return tz.shard(model, optimizer, plan, precision=precision, mesh=toys.mesh_for(plan, 4), **options)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", [*toys.EVERY_PLAN, "zero3@cpu-all"])
def test_memory_and_traffic_are_the_bill_to_the_byte(plan: str, form: str) -> None:
    base = frozen_net()

    def body(rank: int) -> None:
        model, optimizer = shard_frozen(base, plan, form)
        engine = engine_of(model)
        packed = [bucket for bucket in engine.buckets() if bucket.spec.packed is not None]
        block = FrozenFormat(form).blocks
        assert len(packed) == 3
        for bucket in packed:
            assert bucket.weight.nbytes == bucket.spec.numel(bucket.spec.weight_axes) // block.numel * block.nbytes
        toys.train(model, optimizer, 1, rank)  # finds the order
        for steps in range(1, 3):
            engine.traffic.reset()
            engine.tally.ledger.peak_bytes = engine.tally.ledger.live_bytes
            toys.train(model, optimizer, 1, rank, first=steps)
            promised = engine.promise.traffic()
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                assert engine.traffic.bytes[kind] == promised.bytes[kind], kind
                assert engine.traffic.count[kind] == promised.count[kind], kind
            assert engine.peak_transient_bytes == engine.bill.transient_bytes
        assert engine.state_bytes() == engine.bill.weight_bytes + engine.bill.master_bytes + engine.bill.moments_bytes

    toys.on_ranks(4, body)


@pytest.mark.parametrize("plan", ["shard_grad_op", "hybrid_shard_zero2"])
def test_what_lies_beside_packed_weights_is_not_sent_again_in_backward(plan: str) -> None:
    """Where the plan keeps whole weights from forward to backward, which packed ones are not."""
    base = frozen_net()

    def body(rank: int) -> list[int]:
        model, optimizer = shard_frozen(base, plan)
        engine = engine_of(model)
        toys.train(model, optimizer, 1, rank)
        engine.traffic.reset()
        engine.tally.ledger.peak_bytes = engine.tally.ledger.live_bytes
        loss = toys.loss_of(model, toys.batch(1, rank))
        after_forward = engine.traffic.bytes["all_gather"]
        loss.backward()
        after_backward = engine.traffic.bytes["all_gather"]
        optimizer.step()
        optimizer.zero_grad()
        assert engine.traffic.bytes["all_gather"] == engine.promise.traffic().bytes["all_gather"]
        assert engine.peak_transient_bytes == engine.bill.transient_bytes
        return [after_forward, after_backward]

    for after_forward, after_backward in toys.on_ranks(4, body):
        assert after_backward == after_forward > 0


def test_gathers_of_packed_weights_send_their_bytes() -> None:
    """Forward and backward of three blocks of 40 x 81 and 81 x 40, each rank its half of 34 bytes for 64 elements."""
    base = frozen_net()
    sent = {}
    for frozen in (None, "nf4"):

        def body(rank: int, frozen: str | None = frozen) -> int:
            model, optimizer = shard_frozen(base, "zero3", frozen)  # type: ignore[arg-type]
            toys.train(model, optimizer, 1, rank)
            engine_of(model).traffic.reset()
            toys.train(model, optimizer, 1, rank, first=1)
            return engine_of(model).traffic.bytes["all_gather"]

        sent[frozen] = toys.on_ranks(2, body)[0]
    elements = 2 * (40 * 81 + 24)  # each matrix is padded to whole blocks
    assert sent[None] - sent["nf4"] == 2 * 3 * elements * (2 - 34 / 64) / 2


def test_weights_at_rest_hold_no_more_than_their_bytes() -> None:
    with fake_group(8), census():
        base = frozen_net(64)
        before = live_bytes() - sum(parameter.nbytes for parameter in base.parameters())
        optimizer = toys.adamw([p for p in base.parameters() if p.requires_grad])
        model, optimizer = tz.shard(base, optimizer, "zero3", precision=tz.Precision(frozen="nf4"))  # type: ignore[arg-type]
        bill = engine_of(model).bill
        assert live_bytes() - before == bill.weight_bytes + bill.master_bytes
        toys.loss_of(model, toys.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(toys.batch())
        assert live_bytes() - before == bill.weight_bytes + bill.master_bytes + bill.moments_bytes


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", mostly_long(FORMS, "nf4-double"))
def test_a_checkpoint_is_resumed_to_the_bit_on_other_ranks_and_plans(form: str, tmp_path: Path) -> None:
    base = frozen_net()

    def save(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer = shard_frozen(base, "zero3", form)
        toys.train(model, optimizer, 2, 0)
        tz.checkpoint.save(tmp_path / "at 2", model, optimizer)
        return toys.train(model, optimizer, 2, 0, first=2), toys.full_parameters(model)

    def resume(rank: int, plan: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(1)
        model, optimizer = shard_frozen(frozen_net().apply(_other_values), plan, form)
        tz.checkpoint.load(tmp_path / "at 2", model, optimizer)
        return toys.train(model, optimizer, 2, 0, first=2), toys.full_parameters(model)

    losses, wanted = toys.on_ranks(4, save)[0]
    for ranks, plan in ((1, "zero0"), (4, "hpz"), (4, "zero3@cpu-all")):
        found, parameters = toys.on_ranks(ranks, lambda rank, plan=plan: resume(rank, plan))[0]
        assert found == pytest.approx(losses, abs=1e-3)  # sums over ranks of other numbers
        for name in IN_FOUR_BITS:
            assert torch.equal(parameters[name], wanted[name])


def _other_values(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def test_a_state_dict_has_what_is_computed_with_and_loading_packs_anew() -> None:
    base = frozen_net()

    def body(rank: int) -> None:
        model, _ = shard_frozen(base, "zero3", "nf4")
        weight = base.blocks[0].up.weight.detach()
        assert torch.equal(model.state_dict()["blocks.0.up.weight"].float(), rounded(weight, "nf4"))
        model.load_state_dict({"blocks.0.up.weight": weight.T.contiguous().view(weight.shape)}, strict=False)
        other = rounded(weight.T.contiguous().view(weight.shape), "nf4")
        assert torch.equal(toys.full_parameters(model)["blocks.0.up.weight"], other.bfloat16())

    toys.on_ranks(2, body)


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_what_is_computed_with_is_what_is_saved(name: str) -> None:
    def body(rank: int) -> None:
        model, _ = shard_frozen(frozen_net(), "zero3", name=name)
        full, saved = toys.full_parameters(model), model.state_dict()
        for key in IN_FOUR_BITS:
            assert torch.equal(full[key], saved[key].to(full[key].dtype))

    toys.on_ranks(2, body)


def test_codes_of_a_layer_that_decodes_them_itself_stay_what_they_are() -> None:
    base = frozen_net()
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for block in base.blocks:
        block.coded = nn.Linear(16, 16, bias=False)
        block.coded.weight = nn.Parameter(codes.clone(), requires_grad=False)

    def body(rank: int) -> None:
        model, _ = shard_frozen(base, "zero3")
        assert torch.equal(toys.full_parameters(model)["blocks.1.coded.weight"], codes)

    toys.on_ranks(2, body)


def test_values_on_the_meta_device_come_packed() -> None:
    def body(rank: int) -> None:
        with torch.device("meta"):
            model = frozen_net()
        precision = replace(tz.Precision.named("bf16"), frozen="nf4")
        model, _ = tz.shard(model, None, "zero3", precision=precision)
        weight = toys.full_parameters(model)["blocks.1.down.weight"]
        assert torch.equal(weight, rounded(weight.float(), "nf4").bfloat16()) and weight.std() > 0

    toys.on_ranks(2, body)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_written_into_packed_weights_is_refused() -> None:
    base = frozen_net()

    def write(model: Any, rank: int, how: Any) -> None:
        with tz.gathered(model, write=how) as parameters:
            if how is True or rank == 0:
                parameters["blocks.0.up.weight"].zero_()

    def write_over_a_zero(model: Any, number: int) -> None:
        with tz.gathered(model, write=True) as parameters:
            bits = parameters["blocks.1.down.weight"].detach().view(torch.int16).numpy()  # leaves no trace
            bits[tuple(numpy.argwhere(bits == 0)[-1])] = number

    def body(rank: int) -> None:
        for plan in ("zero3", "zero1"):
            model, _ = shard_frozen(base, plan)
            for how in (True, "first rank"):
                with pytest.raises((Misuse, BadInput), match=r"'blocks\.0\.up\.weight' written to|Rank 0 cannot"):
                    write(model, rank, how)
            for number in (1, 0x7FC0):  # the second is NaN
                with pytest.raises((Misuse, BadInput), match=r"'blocks\.1\.down\.weight' written to|Rank . cannot"):
                    write_over_a_zero(model, number)
            with torch.no_grad(), tz.gathered(model, write=True) as parameters:
                parameters["blocks.0.up.bias"].fill_(2.0)
            found = toys.full_parameters(model)
            assert torch.equal(found["blocks.0.up.weight"], rounded(base.blocks[0].up.weight, "nf4").bfloat16())
            assert (found["blocks.0.up.bias"] == 2).all()

    toys.on_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda m: m.requires_grad_(True), {}, "no unit has a frozen weight of a linear layer"),
        (lambda m: m.requires_grad_(False), {"units": ["blocks.*.up", "blocks.*.down"]}, "no unit has a frozen weight"),
    ],
)
def test_nothing_to_keep_in_4_bits_is_refused(change: Any, options: dict[str, Any], message: str) -> None:
    def body(rank: int) -> None:
        model = change(frozen_net())
        with pytest.raises(BadInput, match=message):
            tz.shard(model, None, "zero3", precision=tz.Precision(frozen="nf4"), **options)  # type: ignore[arg-type]

    toys.on_ranks(1, body)


def test_other_names_are_refused() -> None:
    with pytest.raises(BadInput, match=r"frozen is 'nf5'; it must be one of nf4, nf4-double, or None. Did you mean"):
        tz.Precision(frozen="nf5")  # type: ignore[arg-type]


def test_pieces_of_files_that_are_no_whole_pages_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        with pytest.raises(BadInput, match="frozen is nf4-double under a plan that keeps weights in files"):
            shard_frozen(frozen_net(), "zero3@nvme-all", "nf4-double", offload=tz.Offload(path=tmp_path))

    toys.on_ranks(1, body)


@pytest.mark.parametrize(
    ("box", "nf4", "double"),
    [
        (Box.cut((256, 256), 0, [(0, 64)]), False, False),
        (Box.cut((256, 256), 0, [(64, 65)]), False, True),
        (Box.cut((256, 40), 0, [(0, 8)]), False, True),
        (Box.cut((256, 40), 0, [(0, 3)]), True, True),
        (Box.cut((256, 256), 1, [(128, 256)]), False, True),
        (Box.cut((256, 256), 1, [(0, 100)]), True, True),
        (Box.cut((3, 96), 1, [(0, 64)]), True, True),
        (Box.all_of((3, 5)), False, False),
    ],
)
def test_blocks_that_ranks_along_tp_would_cut(box: Box, nf4: bool, double: bool) -> None:
    """Whether the blocks of a part, rounded by itself, are those of the whole matrix."""
    for form, cut in (("nf4", nf4), ("nf4-double", double)):
        assert cuts_blocks(box, FrozenFormat(form).blocks.numel) == cut
        if not cut:
            value = torch.randn(box.shape)
            assert torch.equal(rounded(box.of(value), form), box.of(rounded(value, form)))
