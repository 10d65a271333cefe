"""States of optimizers in 8 bits: each bit as in a single process that rounds whole tensors, wherever they rest."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import StateFormat, engine_of, estimate
from terrazzo.engine.formats.state_blocks import STATE_FP8, STATE_INT8, StateBlocks
from terrazzo.errors import BadInput
from tests.engine.census import PeakBytes, census, live_bytes
from tests.engine.models import base_model
from tests.engine.narrow import keep_rounded, rounded
from tests.engine.offload import runs
from tests.engine.parity import CUSTOM, Case, assert_parity, axes, run_on_threads
from tests.engine.reference import Recipe, Step, Trainer
from tests.engine.toys import Net, assert_equal, batch, full_parameters, loss_of, on_ranks, sharded, step
from tests.helpers.cover import mostly_long
from tests.helpers.fake import fake_group
from tests.helpers.threads import exclusive

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamW fused amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "Adam foreach": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Lion": lambda model: tz.optim.Lion(model.parameters(), lr=1e-3),
}
CASES = [
    *(Case(plan, shards) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op") for shards in (1, 3)),
    *(Case(plan, 2, replicas=2) for plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
]


@functools.cache
def alone(name: str, form: str, recipe: Recipe) -> list[Step]:
    padded = "fused" in name
    trainer = Trainer(recipe, lambda model: keep_rounded(OPTIMIZERS[name](model), form), padded=padded)
    return [trainer.step() for _ in range(recipe.steps)]


def precision(form: str, name: str = "fp32") -> tz.Precision:
    return replace(tz.Precision.named(name), moments=form)


def check(case: Case, form: str, name: str = "AdamW") -> None:
    case = replace(case, dtypes=precision(form, case.precision))
    assert_parity(case, run_on_threads(case, make_optimizer=OPTIMIZERS[name]), alone(name, form, case.recipe))


@pytest.mark.cover(case=axes, strength=1, turns=2)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_is_bitwise_the_single_process(case: Case, form: str, name: str) -> None:
    check(replace(case, precision=name, variant="unused", steps=4), form)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("plan", ["zero3", "zero1"])
@pytest.mark.parametrize("name", mostly_long([*OPTIMIZERS][1:], "AdamW fused amsgrad", "RAdam", "SGD", "Lion"))
def test_every_optimizer_that_may_is_bitwise_the_single_process(name: str, plan: str, form: str) -> None:
    check(Case(plan, 3), form, name)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("tiers", ["cpu-all", "nvme", "all on nvme", "shares"])
@pytest.mark.parametrize("case", [Case("zero1", 3), Case("zero3", 2), Case("hpz", 2, replicas=2)], ids=str)
def test_every_tier_is_bitwise_the_single_process(case: Case, tiers: str, form: str, tmp_path: Path) -> None:
    moved = runs.on_tiers(replace(case, dtypes=precision(form)), tiers, tmp_path, block_mib=1)
    ranks = runs.train(moved, make_optimizer=OPTIMIZERS["AdamW fused amsgrad"])
    runs.assert_reference(moved, ranks, alone("AdamW fused amsgrad", form, case.recipe))


def test_states_of_several_cells_in_files_are_those_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Net(width=300, depth=1)  # 361 thousand elements in a unit, of which a cell has 262 thousand

    def body(plan: str, resumed: bool) -> list[Tensor]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        settings = {"offload": tz.Offload(path=tmp_path, block_mib=1, depth=1, direct=False)} if "nvme" in plan else {}
        model, optimizer = tz.shard(model, optimizer, plan, precision=precision("int8"), **settings)
        for t in range(4):
            step(model, optimizer, loss_of(model, batch(t)))
            if resumed and t == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        kept = optimizer.state_dict()["state"].values()
        return [*full_parameters(model).values(), *(value for each in kept for value in each.values())]

    wanted = on_ranks(1, lambda rank: body("zero1", False))[0]
    for resumed in (False, True):
        found = on_ranks(1, lambda rank, resumed=resumed: body("zero1@nvme", resumed))[0]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_pieces_of_files_that_are_no_whole_pages_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        offload = tz.Offload(path=tmp_path, block_mib=0.5)
        with pytest.raises(BadInput, match=r"block_mib is 0\.5 and moments are in int8"):
            sharded(Net(), "zero3@nvme", precision=precision("int8"), offload=offload)

    on_ranks(2, body)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "hpz"])
def test_states_equal_the_bill_to_the_byte(plan: str, name: str) -> None:
    """In memory from the start, a byte and a sixty-fourth for each element of each state."""
    for rank in (0, 7):
        with fake_group(8, rank), census():
            mesh = (
                None if plan != "hpz" else init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
            )
            before, model = live_bytes(), Net()
            model, optimizer = tz.shard(model, OPTIMIZERS[name](model), plan, precision=precision("int8"), mesh=mesh)
            engine = engine_of(model)
            bill = engine.bill
            owned = sum(bucket.master.range.numel for bucket in engine.buckets())
            apart = owned * 260 // 256 * (2 if name == "AdamW" else 1)
            assert live_bytes() - before == bill.weight_bytes + bill.master_bytes + apart
            loss_of(model, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert live_bytes() - before == bill.weight_bytes + bill.master_bytes + bill.moments_bytes
            assert engine.state_bytes() == bill.weight_bytes + bill.master_bytes + bill.moments_bytes
            assert 0 <= bill.moments_bytes - apart <= 64  # step counts


@pytest.mark.parametrize("rounding", mostly_long(["fp32", "stochastic", "remainder"], "stochastic"))
def test_states_are_never_all_in_fp32(rounding: str) -> None:
    """A step takes the memory of one tile after the other, of 65,536 elements, and less than is counted for it."""
    kind = precision("int8") if rounding == "fp32" else replace(STOCHASTIC, rounding=rounding)
    with fake_group(1), census():
        model = nn.Linear(512, 512, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = tz.shard(model, optimizer, "zero1", precision=kind)
        model(torch.randn(2, 512, dtype=kind.compute)).sum().backward()
        held = live_bytes()
        with PeakBytes() as peak:
            optimizer.step()
        assert 65_536 * 16 < peak.peak_bytes - held <= StateFormat.INT8.blocks.scratch_bytes(2**18, "cpu") == 2**16 * 32


# -- saving and loading --------------------------------------------------------------------------------------------

Kept = dict[tuple[str, str], Tensor]
SETTINGS = {"fused": True, "lr": 1e-2, "weight_decay": 0.1}


def run(plan: str, form: str | None, steps: range, load: Path | None = None, save: Path | None = None) -> Kept:
    """Trains on 1, 2 or 4 ranks, whose mean gradients are those of one; the weights, and all states."""
    with exclusive():
        torch.manual_seed(0)
        model: nn.Module = Net()
    ranks = dist.get_world_size()
    optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
    kind = precision(form) if form else "fp32"
    mesh = tz.mesh(dp_replicate=2, dp_shard=ranks // 2) if plan in ("hpz", "hfsdp") else None
    model, optimizer = tz.shard(model, optimizer, plan, precision=kind, mesh=mesh)
    if load is not None:
        tz.checkpoint.load(load, model, optimizer)
    for t in steps:
        step(model, optimizer, loss_of(model, batch(t)))
    if save is not None:
        tz.checkpoint.save(save, model, optimizer)
    kept = optimizer.state_dict()["state"]
    found = {(name, "weight"): value for name, value in full_parameters(model).items()}
    names = [name for name, _ in model.named_parameters()]
    return found | {(names[i], key): value for i, each in kept.items() for key, value in each.items()}


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("second", [("zero3@cpu", 4), ("zero0", 1), ("hfsdp", 4)])
@pytest.mark.parametrize("first", [("zero3", 2), ("zero1@cpu", 1), ("hpz", 4)])
def test_a_run_goes_on_under_any_plan_to_the_same_bits(
    first: tuple[str, int], second: tuple[str, int], form: str, tmp_path: Path
) -> None:
    (plan, ranks), (other, others) = first, second
    on_ranks(ranks, lambda rank: run(plan, form, range(3), save=tmp_path / "c"))
    found = on_ranks(others, lambda rank: run(other, form, range(3, 6), load=tmp_path / "c"))
    wanted = on_ranks(1, lambda rank: run("zero0", form, range(6)))[0]
    for each in found:
        assert_equal(each, wanted)


def test_states_change_between_formats_on_their_way_through_a_checkpoint(tmp_path: Path) -> None:
    before = on_ranks(2, lambda rank: run("zero3", None, range(3), save=tmp_path / "wide"))[0]
    narrowed = on_ranks(3, lambda rank: run("zero1", "int8", range(0), tmp_path / "wide", tmp_path / "narrow"))[0]
    widened = on_ranks(2, lambda rank: run("zero2", None, range(0), load=tmp_path / "narrow"))[0]
    squares = {"exp_avg": False, "exp_avg_sq": True}
    wanted = {
        key: rounded(value, "int8", squares[key[1]]) if key[1] in squares else value for key, value in before.items()
    }
    assert_equal(narrowed, wanted)
    assert_equal(widened, wanted)


def test_a_state_dict_of_plain_pytorch_is_taken_and_given() -> None:
    base = Net()

    def body(rank: int) -> None:
        plain, narrow = copy.deepcopy(base), copy.deepcopy(base)
        alone = torch.optim.AdamW(plain.parameters(), **SETTINGS)
        step(plain, alone, loss_of(plain, batch(0)))
        optimizer: Any = torch.optim.AdamW(narrow.parameters(), **SETTINGS)
        narrow, optimizer = tz.shard(narrow, optimizer, "zero3", precision=precision("fp8"))
        optimizer.load_state_dict(alone.state_dict())
        given = optimizer.state_dict()
        for index, kept in alone.state_dict()["state"].items():
            for key, value in kept.items():
                wanted = value if key == "step" else rounded(value, "fp8", key == "exp_avg_sq")
                assert torch.equal(given["state"][index][key], wanted)
        alone.load_state_dict(given)
        with pytest.raises(tz.Misuse, match=r"'exp_avg', which the optimizer keeps in 8 bits"):
            next(iter(optimizer.state.values()))["exp_avg"].sum()

    on_ranks(2, body)


# -- codes ---------------------------------------------------------------------------------------------------------


def through(values: Tensor, form: str, squares: bool) -> tuple[Tensor, Tensor]:
    """The blocks that values become, and the values that those are."""
    packed = torch.zeros(values.numel() // 256 * 260, dtype=torch.uint8)
    blocks = StateFormat(form).blocks.of("exp_avg_sq" if squares else "exp_avg")
    blocks.encode(values, packed)
    return packed, blocks.decode(packed)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_are_those_of_plain_pytorch_and_stay_when_they_are_read(form: str, squares: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-40, 10, (512, 1), generator=generator).float())
    values = torch.randn(512, 256, generator=generator).mul(torch.randn(512, 256, generator=generator).mul(3).exp())
    values = (values * sizes).flatten()
    values[:256], values[300], values[700] = 0.0, 0.0, 1e-30
    values = values.square() if squares else values
    packed, kept = through(values, form, squares)
    assert torch.equal(kept, rounded(values, form, squares))
    assert torch.equal(through(kept, form, squares)[0], packed)
    assert (kept[values == 0] == 0).all()
    assert not squares or (kept[values > 0] > 0).all()
    largest = values.view(512, 256).abs().amax(1)
    assert torch.equal(kept.view(512, 256).abs().amax(1), largest) or squares
    near = (values.abs().view(512, 256) > largest[:, None] * 2**-10).flatten()
    error = (kept / values - 1)[near].abs()
    assert error.max() < 0.3
    assert error.square().mean().sqrt() < 0.08


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_what_is_not_finite_makes_its_block_so_and_no_other(form: str) -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(1024)
        values[300] = bad
        kept = through(values, form, False)[1].view(4, 256)
        assert torch.equal(kept.isfinite().all(1), torch.tensor([True, False, True, True]))
        assert not kept[1].isfinite().any()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_an_average_of_squares_follows_gradients_that_become_smaller(form: str) -> None:
    """By a tenth of a percent in a step: rounding to the nearest code would hold it still. Beside a gradient that is
    50,000 times as large too, where e4m3 has no normal numbers.
    """
    generator, sizes = torch.Generator().manual_seed(0), torch.ones(1024)
    sizes[256:512], sizes[256] = 1e-4, 1.0
    kept = exact = torch.zeros(1024)
    for t in range(900):
        if t == 400:
            sizes[::2] *= 0.2
            sizes[256] = 1.0
        squares = (torch.randn(1024, generator=generator) * sizes).square()
        kept, exact = kept.lerp(squares, 0.001), exact.lerp(squares, 0.001)
        kept = through(kept, form, True)[1]
    for part in (slice(512, None, 2), slice(1, 256, 2), slice(257, 512, 2), slice(258, 512, 2)):
        assert abs(kept[part].sqrt().mean() / exact[part].sqrt().mean() - 1) < 0.1


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_not_known_to_work_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        for make, name in ((torch.optim.Adagrad, "Adagrad"), (tz.optim.AdEMAMix, "AdEMAMix"), (Own, "Own")):
            model = Net()
            with pytest.raises(BadInput, match=f"moments in int8, and {name} is not known to work with states of 8"):
                tz.shard(model, make(model.parameters(), lr=0.1), "zero3", precision=precision("int8"))
        model = Net()
        matrices, others = tz.optim.hidden_matrices(model)
        with pytest.raises(BadInput, match="moments in fp8, and Muon is not known"):
            tz.shard(model, tz.optim.Muon(matrices, others, lr=0.1), "zero3", precision=precision("fp8"))
        with pytest.raises(BadInput, match=r"AdamW8bit keeps blocks .* Use torch\.optim\.AdamW, .* moments='int8'"):
            tz.shard(model, AdamW8bit(model.parameters()), "zero3")
        model, _ = tz.shard(Net(), None, "zero3", precision=precision("fp8"))
        with pytest.raises(BadInput, match="moments in fp8, and RMSprop is not known"):
            tz.attach(model, torch.optim.RMSprop(model.parameters()))

    on_ranks(2, body)
    with pytest.raises(BadInput, match="moments in int8 under a master in fp64"):
        tz.Precision(master="fp64", moments="int8")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="master is 'int8'; it must be one of fp32, bf16, fp16, fp64"):
        tz.Precision(master="int8")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"moments is 'int4'; it must be one of .*, int8, fp8"):
        tz.Precision(moments="int4")  # type: ignore[arg-type]


class AdamW8bit(torch.optim.AdamW):
    """Called as those of bitsandbytes and torchao are."""


class Own(torch.optim.AdamW):
    """A user's: what it keeps may be anything."""

    elementwise = True


def test_an_optimizer_that_comes_later_uses_the_same_memory() -> None:
    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        first: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
        model, first = tz.shard(model, first, "zero3", precision=precision("int8"))
        step(model, first, loss_of(model, batch(0)))
        held = engine_of(model).state_bytes()
        del first
        second: Any = tz.attach(model, torch.optim.AdamW(model.parameters(), **SETTINGS))
        step(model, second, loss_of(model, batch(1)))
        assert engine_of(model).state_bytes() == held
        return list(full_parameters(model).values())

    found = on_ranks(2, body)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("tier", ["", "@cpu"])
def test_a_momentum_that_is_turned_on_later_is_that_of_plain_pytorch(tier: str) -> None:
    """Nobody has seen its state when the optimizer comes, as under OneCycleLR: it is kept in fp32."""
    base = nn.Linear(1024, 128, bias=False)  # two tiles

    def body(model: Any, optimizer: Any) -> None:
        for t in range(4):
            optimizer.param_groups[0]["momentum"] = 0.9 if t else 0.0
            step(
                model, optimizer, model(torch.randn(4, 1024, generator=torch.Generator().manual_seed(t))).square().sum()
            )

    def on_a_rank(rank: int) -> Tensor:
        model: Any = copy.deepcopy(base)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        model, optimizer = tz.shard(model, optimizer, f"zero1{tier}", precision=precision("int8"))
        body(model, optimizer)
        return full_parameters(model)["weight"]

    plain = copy.deepcopy(base)
    body(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    assert torch.equal(on_ranks(1, on_a_rank)[0], plain.weight)


@pytest.mark.parametrize("tier", ["", "@cpu"])
def test_a_step_goes_by_what_a_user_has_put_in_the_place_of_a_state(tier: str) -> None:
    base = nn.Linear(64, 64, bias=False)

    def body(model: Any, optimizer: Any) -> None:
        for t in range(3):
            for kept in optimizer.state.values() if t == 1 else ():
                kept["exp_avg"] = torch.full(kept["exp_avg"].shape, 0.5)
                kept["exp_avg_sq"] = torch.full(kept["exp_avg_sq"].shape, 4.0)
            values = torch.randn(4, 64, generator=torch.Generator().manual_seed(t))
            step(model, optimizer, model(values).square().sum())

    def on_a_rank(rank: int) -> Tensor:
        model: Any = copy.deepcopy(base)
        optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
        model, optimizer = tz.shard(model, optimizer, f"zero1{tier}", precision=precision("int8"))
        body(model, optimizer)
        return full_parameters(model)["weight"]

    plain = copy.deepcopy(base)
    body(plain, keep_rounded(torch.optim.AdamW(plain.parameters(), **SETTINGS), "int8"))
    assert torch.equal(on_ranks(1, on_a_rank)[0], plain.weight)


# -- stochastic rounding -------------------------------------------------------------------------------------------


class Stochastic(torch.optim.AdamW):
    """AdamW on fp32 copies of bf16 parameters, to which they are rounded by bits of name, element and step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), **SETTINGS)
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.names:
            if parameter.grad is None:
                continue
            wide = nn.Parameter(padded_to_lines(parameter))
            wide.grad = padded_to_lines(parameter.grad)
            alone = torch.optim.AdamW([wide], **SETTINGS)
            padded = {k: padded_to_lines(v) for k, v in self.state[parameter].items() if k != "step"}
            if padded:
                padded["step"] = self.state[parameter]["step"]
            alone.state[wide] = padded
            alone.step()
            numel = parameter.numel()
            kept = {k: v if k == "step" else v[:numel] for k, v in alone.state[wide].items()}
            self.state[parameter] = {
                k: v if k == "step" else rounded(v, "int8", k == "exp_avg_sq") for k, v in kept.items()
            }
            exact = wide.detach()[:numel]
            bits = rounding_bits(self.names[parameter], range(numel), int(kept["step"]))
            patterns = (exact.view(torch.int32).long() + bits) >> 16 << 16
            parameter.copy_(patterns.int().view(torch.float32).bfloat16().view(parameter.shape))


def padded_to_lines(values: Tensor) -> Tensor:
    """Flat, in fp32, and without a rest that a fused kernel would round otherwise."""
    return nn.functional.pad(values.detach().float().flatten(), (0, -values.numel() % 64))


def rounding_bits(name: str, elements: Iterable[int], step: int) -> Tensor:
    """What is added to the 16 bits that bf16 leaves out."""
    number = step * 0x9E3779B1 + zlib.crc32(name.encode())
    return torch.tensor([mixed(mixed(i) ^ number % 2**32) % 2**16 for i in elements])


def mixed(number: int) -> int:
    """https://github.com/skeeto/hash-prospector, lowbias32."""
    number = (number ^ number >> 16) * 0x7FEB352D % 2**32
    number = (number ^ number >> 15) * 0x846CA68B % 2**32
    return number ^ number >> 16


STOCHASTIC = replace(tz.Precision.named("bf16-pure"), moments="int8", rounding="stochastic")


@pytest.mark.cover(case=axes, strength=1, turns=2)
@pytest.mark.parametrize("tiers", ["", "cpu-all", "nvme"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stochastic_rounding_is_bitwise_that_of_the_single_process(case: Case, tiers: str, tmp_path: Path) -> None:
    case = replace(case, precision="bf16-pure", dtypes=STOCHASTIC, variant="unused")
    if tiers:
        case = runs.on_tiers(case, tiers, tmp_path, block_mib=1)
    ranks = runs.train(case, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **SETTINGS))
    trainer = Trainer(case.recipe, Stochastic)
    runs.assert_reference(case, ranks, [trainer.step() for _ in range(case.steps)])


# -- what rounding leaves out --------------------------------------------------------------------------------------

REMAINDER = replace(tz.Precision.named("bf16-pure"), moments="int8", rounding="remainder")


class OfWideMasters(Trainer):
    """Masters in fp32, of which ranks compute with the nearest bf16 number, the larger one of two that are as near."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = copy.deepcopy(base_model(self.recipe.variant))
        self.optimizer = self.make_optimizer(self.model)
        self.stepped = dict(self.model.named_parameters())

    def _twin(self) -> nn.Module:
        twin = super()._twin()
        for master, computed in zip(self.model.parameters(), twin.parameters(), strict=True):
            if master.requires_grad:
                computed.data = half_away(master.detach()).to(self.compute)
        return twin


def half_away(values: Tensor) -> Tensor:
    """The nearest numbers of eight binary digits."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp((mantissa.abs() * 256 + 0.5).floor() / 256 * mantissa.sign(), exponent)


@pytest.mark.cover(case=axes, strength=1, turns=2)
@pytest.mark.parametrize("accumulate", ["bf16", "fp32"])
@pytest.mark.parametrize("tiers", ["", "cpu-all", "nvme"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masters_with_their_remainder_are_bitwise_those_in_fp32(
    case: Case, tiers: str, accumulate: str, tmp_path: Path
) -> None:
    kind = replace(REMAINDER, reduce=accumulate, accumulate=accumulate)
    case = replace(case, precision="bf16" if accumulate == "fp32" else "bf16-pure", dtypes=kind, variant="unused")
    if tiers:
        case = runs.on_tiers(case, tiers, tmp_path, block_mib=1)
    ranks = runs.train(case, make_optimizer=OPTIMIZERS["SGD"])
    trainer = OfWideMasters(case.recipe, lambda model: keep_rounded(OPTIMIZERS["SGD"](model), "int8"))
    runs.assert_reference(case, ranks, [trainer.step() for _ in range(case.steps)])


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero1@cpu", "zero3", "hpz"])
def test_only_what_is_written_begins_without_a_remainder(plan: str) -> None:
    """A state dict has the masters in fp32. Where weights stay whole, a parameter that is written to begins anew."""
    base, stays = Net(), plan in ("zero0", "zero1")

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        mesh = tz.mesh(dp_replicate=2, dp_shard=1) if plan == "hpz" else None
        model: Any = copy.deepcopy(base)
        optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
        model, optimizer = tz.shard(model, optimizer, plan, precision=REMAINDER, mesh=mesh)
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        step(model, optimizer, loss_of(model, batch(0)))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with tz.gathered(model, write=True), torch.no_grad():
            model.head.weight[0] = 0.5
            model.head.weight[1] *= -1
        return initial, before, dict(model.state_dict())

    for initial, before, after in on_ranks(2, body):
        assert_equal(initial, base.state_dict())
        edited, row = after.pop("head.weight"), before.pop("head.weight")
        assert_equal(after, before)
        assert torch.equal(edited[0], torch.full_like(edited[0], 0.5))
        assert torch.equal(edited[1], -half_away(row[1]).float())
        assert torch.equal(edited[2:], half_away(row[2:]).float() if stays else row[2:])


WRITES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "data-copied": lambda weight, value: weight.data.copy_(value),
    "data-set": lambda weight, value: weight.data.__setitem__(..., value),
    "data-scaled": lambda weight, value: weight.data.mul_(value / weight.detach()),
    "data-given": lambda weight, value: setattr(weight, "data", value),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero1@cpu"])
def test_what_is_written_through_data_is_kept_exactly_and_alone(plan: str, write: str) -> None:
    """Whatever the remainder was: neighbours in the bucket keep theirs."""

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
        model, optimizer = tz.shard(model, optimizer, plan, precision=REMAINDER)
        step(model, optimizer, loss_of(model, batch(0)))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        value = -half_away(before["head.weight"]).bfloat16()
        WRITES[write](model.head.weight, value)
        return value, before, dict(model.state_dict())

    for value, before, after in on_ranks(2, body):
        del before["head.weight"]
        assert torch.equal(after.pop("head.weight"), value.float())
        assert_equal(after, before)


@pytest.mark.parametrize("other", ["zero3", "zero1@cpu"])
def test_masters_go_through_checkpoints_to_fp32_and_back(other: str, tmp_path: Path) -> None:
    """To the bit, moments too: those of an fp32 master are rounded in 8 bits here as there."""

    def body(rank: int, plan: str, kind: tz.Precision, load: str | None, save: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **SETTINGS)
        model, optimizer = tz.shard(model, optimizer, plan, precision=kind)
        if load is None:
            step(model, optimizer, loss_of(model, batch(0)))
        else:
            tz.checkpoint.load(tmp_path / load, model, optimizer)
        tz.checkpoint.save(tmp_path / save, model, optimizer)
        return dict(model.state_dict())

    wide = replace(tz.Precision.named("bf16"), moments="int8")
    first = on_ranks(2, lambda rank: body(rank, "zero1", REMAINDER, None, "a"))[0]
    second = on_ranks(3, lambda rank: body(rank, "zero2", wide, "a", "b"))[0]
    third = on_ranks(1, lambda rank: body(rank, other, REMAINDER, "b", "c"))[0]
    assert {value.dtype for value in first.values()} == {torch.float32}
    assert_equal(second, first)
    assert_equal(third, first)


def test_averages_and_outer_steps_see_the_remainder() -> None:
    """Weights of 1 that lose 2**-13 in each of two steps, of which bf16 alone would keep nothing."""

    def body(rank: int, **options: Any) -> tuple[Tensor, Tensor | None]:
        model: Any = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2**-13, weight_decay=0.0, eps=0.0)
        mesh = tz.mesh(dp_replicate=2, dp_shard=1)
        model, optimizer = tz.shard(model, optimizer, "zero3", precision=REMAINDER, mesh=mesh, **options)
        ema = None if options else tz.EMA(model, decay=0.5)
        for _ in range(2):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ema is not None:
                ema.update()
        weights, averages = model.state_dict()["weight"], None
        if ema is not None:
            with ema.swapped():
                averages = model.state_dict()["weight"]
            assert torch.equal(model.state_dict()["weight"], weights)
        return weights, averages

    near = functools.partial(torch.testing.assert_close, rtol=0, atol=2**-22)
    for weights, averages in on_ranks(2, body):
        near(weights, torch.full_like(weights, 1 - 2 * 2**-13))
        near(averages, torch.full_like(weights, 1 - 1.25 * 2**-13))
    for weights, _ in on_ranks(2, lambda rank: body(rank, diloco=tz.DiLoCo(sync_every=2, lr=0.5, momentum=0.0))):
        near(weights, torch.full_like(weights, 1 - 2**-13))


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "zero1@cpu"])
def test_a_remainder_is_in_the_bill_to_the_byte(plan: str) -> None:
    with fake_group(8), census():
        before, model = live_bytes(), nn.Linear(512, 512, bias=False)
        model, optimizer = tz.shard(model, torch.optim.AdamW(model.parameters()), plan, precision=REMAINDER)
        bill, owned = engine_of(model).bill, 512**2 // (1 if plan == "zero0" else 8)
        rests = 512**2 if plan != "zero3" else owned
        model(torch.randn(2, 512, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        in_memory = bill.weight_bytes + bill.master_bytes + bill.moments_bytes + bill.host_bytes
        assert bill.weight_bytes == rests * 2
        if plan == "zero1@cpu":  # masters, in bf16, and their remainder are on the host, and so are moments
            assert bill.host_bytes >= owned * (2 + 2) + 2 * owned * 260 // 256
        else:
            assert bill.master_bytes == owned * 2
            assert live_bytes() - before == in_memory


def test_small_updates_are_lost_by_rounding_to_the_nearest_alone() -> None:
    """A weight of 1, from which each of 32 steps takes a thirty-second of what is between it and the next in bf16."""

    def body(rank: int, kind: tz.Precision) -> float:
        model: nn.Module = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2**-13, weight_decay=0.0)
        model, optimizer = tz.shard(model, optimizer, "zero3", precision=kind)
        for _ in range(32):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)["weight"].double().mean().item()

    for rounding, wanted in (("nearest", 1.0), ("stochastic", 1 - 32 * 2**-13), ("remainder", 1 - 32 * 2**-13)):
        kind = replace(STOCHASTIC, rounding=rounding)
        for found in on_ranks(2, lambda rank, kind=kind: body(rank, kind)):
            assert found == pytest.approx(wanted, abs=3e-4)


def test_what_stochastic_rounding_is_not_of_is_refused() -> None:
    for others in ({}, {"moments": "int8"}, {"master": "bf16"}):
        with pytest.raises(BadInput, match="rounding 'stochastic' is of master weights in bf16 with"):
            tz.Precision(rounding="stochastic", **others)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"rounding is 'up'\. Use one of nearest, stochastic"):
        tz.Precision(rounding="up")  # type: ignore[arg-type]

    def body(rank: int) -> None:
        model = Net()
        with pytest.raises(BadInput, match=r"rounding 'stochastic', .* and Lion does not count steps"):
            tz.shard(model, tz.optim.Lion(model.parameters()), "zero3", precision=STOCHASTIC)

    on_ranks(1, body)


@pytest.mark.parametrize(("kind", "master"), [(STOCHASTIC, 0), (REMAINDER, 2)], ids=["stochastic", "remainder"])
def test_a_parameter_takes_six_or_eight_bytes_and_a_thirtieth(kind: tz.Precision, master: int) -> None:
    with fake_group(1), torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
        bill = estimate(model, torch.optim.AdamW(model.parameters()), "zero1", precision=kind)
    resting = bill.weight_bytes + bill.master_bytes + bill.grad_bytes + bill.moments_bytes
    assert resting == 4096**2 * (2 + master + 2) + 4096**2 * 2 * 260 // 256 + 4


@pytest.mark.parametrize("codes", [STATE_INT8, STATE_FP8], ids=["int8", "fp8"])
def test_codes_of_squares_are_encoded_to_the_same_down_to_the_bound_that_is_said(codes: StateBlocks) -> None:
    squares = codes.of("exp_avg_sq")
    roots = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)).pow(8)
    roots = roots / roots.amax(1, keepdim=True)
    for largest in (1.0, 2.0**-20, 2.0**-44):
        first, again = (torch.zeros(64 * 260, dtype=torch.uint8) for _ in range(2))
        squares.encode((roots * largest).square().flatten(), first)
        squares.encode(squares.decode(first), again)
        assert torch.equal(first, again)
