"""The memory bill against memory: states walked storage by storage, transient peaks, and what a deletion gives back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import Precision, WireFormat, engine_of
from terrazzo.engine.comm.transfer import Released
from terrazzo.engine.plan.moves import Divisor, GradientFate
from tests.engine.census import PeakBytes, census, live_bytes
from tests.engine.toys import EVERY_PLAN, TABLE_2D, Block, Net, adamw, batch, loss_of, on_ranks, sharded, train
from tests.helpers.cover import places
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

pytestmark = pytest.mark.filterwarnings("ignore:tz.Precision. gather changes nothing under plan zero0:UserWarning")

PRECISIONS: dict[str, Precision | str] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "bf16-pure": "bf16-pure",
    "fp16": Precision(weight="fp16", compute="fp16"),  # type: ignore[arg-type]
    "mixed": Precision(weight="fp32", compute="bf16", reduce="bf16", moments="bf16"),  # type: ignore[arg-type]
    "gathered in int8": Precision(weight="bf16", compute="bf16", gather="int8"),  # type: ignore[arg-type]
    "bf16-pure, in int8": replace(Precision.named("bf16-pure"), gather=WireFormat.INT8),
    "sums in int8": Precision(weight="bf16", compute="bf16", quantized_reduce="int8"),  # type: ignore[arg-type]
    "sums in int4": Precision(gather="int8", reduce="bf16", quantized_reduce="int4"),  # type: ignore[arg-type]
    "error feedback": Precision(weight="bf16", compute="bf16", quantized_reduce="int4", error_feedback=True),  # type: ignore[arg-type]
    "gathered in fp8": Precision(gather="fp8"),  # type: ignore[arg-type]
    "wide": Precision(master="fp64", moments="fp64", accumulate="fp64"),  # type: ignore[arg-type]
}


def mesh(plan: str) -> Any:
    if plan not in TABLE_2D:
        return None
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))


class Awkward(nn.Module):
    """Tied, frozen, scalar and empty parameters, an integer one, and two shapes of units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 13)
        self.blocks = nn.ModuleList([Block(13), nn.Linear(13, 13), Block(13)])
        self.head = nn.Linear(13, 17, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.empty.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _check_states(model: Any, plan: str, precision: Precision | str) -> None:
    """Storages that are live beside those of before, at each point of a step."""
    before = live_bytes() - sum(parameter.nbytes for parameter in model.parameters())
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = tz.shard(model, optimizer, plan, units=["blocks.*"], precision=precision, mesh=mesh(plan))
    bill = engine_of(model).bill
    at_rest = before + bill.weight_bytes + bill.master_bytes + bill.residual_bytes
    assert live_bytes() == at_rest
    loss_of(model, batch()).backward()
    assert live_bytes() == at_rest + bill.grad_bytes
    optimizer.step()
    assert live_bytes() == at_rest + bill.grad_bytes + bill.moments_bytes
    optimizer.zero_grad()
    assert live_bytes() == at_rest + bill.moments_bytes
    with torch.no_grad():
        model(batch())
    assert live_bytes() == at_rest + bill.moments_bytes


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("kind", [Net, Awkward])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_states_equal_the_bill_to_the_byte(plan: str, kind: type[nn.Module]) -> None:
    for number, precision in enumerate(PRECISIONS.values()):  # the first rank has whole shards, the last what is left
        for rank in (0, 7) if number == 0 else (7,):
            with fake_group(8, rank), census():
                _check_states(kind(), plan, precision)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop])
def test_moments_of_other_optimizers(make: Any) -> None:
    with fake_group(4), census():
        model = Net()
        model, optimizer = tz.shard(model, make(model.parameters(), lr=0.1), "zero1")
        bill = engine_of(model).bill
        loss_of(model, batch()).backward()
        optimizer.step()
        assert live_bytes() == bill.weight_bytes + bill.master_bytes + bill.grad_bytes + bill.moments_bytes


def test_several_param_groups_are_billed_apart() -> None:
    with fake_group(4), census():
        model = Net()
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "amsgrad": True}]
        model, optimizer = tz.shard(model, torch.optim.AdamW(groups, lr=1e-2), "zero3")
        bill, at_rest = engine_of(model).bill, live_bytes()
        loss_of(model, batch()).backward()
        optimizer.step()
        assert live_bytes() == at_rest + bill.grad_bytes + bill.moments_bytes


def test_the_bill_is_written_before_anything_is_allocated() -> None:
    """The bill of a model on the meta device is that of a real one."""
    bills = []
    for device in ("meta", "cpu"):
        with fake_group(8):
            with torch.device(device):
                model = Net()
            bills.append(engine_of(tz.shard(model, adamw, "hpz", mesh=mesh("hpz"), precision="bf16")[0]).bill)
    assert bills[0] == bills[1]


def test_the_total_and_the_table_show_every_part() -> None:
    with fake_group(2):
        bill = engine_of(tz.shard(Net(), adamw, "zero1", precision="bf16")[0]).bill
    parts = (bill.weight_bytes, bill.master_bytes, bill.grad_bytes, bill.moments_bytes, bill.transient_bytes)
    assert bill.total_bytes == sum(parts)
    assert all(word in bill.table() for word in ("weights", "master", "gradients", "optimizer", "transient", "total"))


# -- transient memory ------------------------------------------------------------------------------------------

CASES = [(1, None), (3, True), (3, False)]


def _step(model: Any, optimizer: Any, micro_batches: int, local: bool | None) -> None:
    for micro in range(micro_batches):
        with contextlib.nullcontext() if micro == micro_batches - 1 else tz.accumulate(model, local=local):
            loss_of(model, batch(micro)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _peak_and_promise(model: Any, optimizer: Any, micro_batches: int, local: bool | None) -> tuple[int, int]:
    _step(model, optimizer, micro_batches, local)
    engine = engine_of(model)
    return engine.peak_transient_bytes, engine.promise.memory(micro_batches, local).transient_bytes


@pytest.mark.cover(strength=1, plan=places)  # pairs meet in tests/planner/test_engine_truth.py
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_transient_peak_equals_the_bill(plan: str, precision: str) -> None:
    with fake_group(8):
        for micro_batches, local in CASES:
            if local is False and plan in ("zero0", "zero1"):
                continue
            model, optimizer = tz.shard(Net(), adamw, plan, precision=PRECISIONS[precision], mesh=mesh(plan))
            peak, promise = _peak_and_promise(model, optimizer, micro_batches, local)
            assert peak == promise, (micro_batches, local)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("precision", ["bf16", "gathered in int8", "bf16-pure, in int8", "sums in int4"])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_transient_peak_on_real_ranks(plan: str, precision: str) -> None:
    base = Net(width=37)
    for micro_batches, local in ((1, None), (2, True)):

        def body(rank: int, case: Any = (micro_batches, local)) -> tuple[int, int]:
            return _peak_and_promise(*sharded(base, plan, 4, precision=PRECISIONS[precision]), *case)

        assert all(peak == promise for peak, promise in on_ranks(4, body)), (micro_batches, local)


class Adapted(nn.Module):
    """Frozen blocks with small trainable parts: two buckets in each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.requires_grad_(False)
        for block in self.net.blocks:
            block.extra = nn.Linear(13, 2, bias=False)
            block.register_forward_hook(lambda module, args, output: output + module.extra(args[0]).sum(-1, True))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_frozen_weights_beside_trainable_ones_are_gathered_at_once(plan: str) -> None:
    """Prefetched together, so that nothing of a unit is left to gather when it runs; as billed."""
    base = Adapted()

    def body(rank: int) -> tuple[int, int, set[int]]:
        model, optimizer = sharded(base, plan, 4, units=[type(base.net.blocks[0])])
        unit, flights = engine_of(model).units[2], set()
        engine_of(model).units[1].module.register_forward_hook(lambda *_: flights.add(len(unit.weights._gathering)))
        return *_peak_and_promise(model, optimizer, 1, None), flights

    for peak, promise, flights in on_ranks(4, body):
        assert peak == promise
        assert flights == ({0} if plan.startswith("zero") and plan != "zero3" else {2})


def _frozen_in_front(inner: bool) -> nn.Module:
    """An embedding and two blocks of four that no gradient goes back through, or one whose inner unit is trained."""
    model = Net(depth=4)
    for part in (model.embed, *model.blocks[:2]):
        part.requires_grad_(False)
    if inner:
        model.blocks[1].down.requires_grad_(True)
    return model


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_frozen_blocks_in_front_are_billed_as_they_run(plan: str, inner: bool) -> None:
    """No backward comes to them, so that their weights are gathered once; what is sent is promised so, too."""
    units = [Block, "blocks.1.down"]
    with fake_group(8):
        for micro_batches, local in CASES if plan not in ("zero0", "zero1") else CASES[:2]:
            model = _frozen_in_front(inner)
            optimizer = adamw([p for p in model.parameters() if p.requires_grad])
            model, optimizer = tz.shard(model, optimizer, plan, units=units, mesh=mesh(plan))
            peak, promise = _peak_and_promise(model, optimizer, micro_batches, local)
            assert peak == promise, (micro_batches, local)
            engine = engine_of(model)
            engine.traffic.reset()
            _step(model, optimizer, micro_batches, local)
            assert +engine.traffic.bytes == +engine.promise.traffic(micro_batches, local).bytes


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_a_backward_of_frozen_blocks_in_front_is_told_of_and_billed_from_then_on(plan: str) -> None:
    """It comes where an input requires gradients, which nobody knows before a forward."""
    with fake_group(8):
        model = _frozen_in_front(inner=False)
        model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        model, optimizer = tz.shard(model, optimizer, plan, units=[Block])
        engine = engine_of(model)
        unaware = engine.bill.transient_bytes
        with pytest.warns(
            UserWarning, match=r"Backward comes to unit 'blocks\.0', which is frozen and registered in front"
        ) as told:
            _step(model, optimizer, 2, None)
        assert len(told) == 1
        engine.tally.reset()
        _step(model, optimizer, 2, None)
        assert engine.peak_transient_bytes == engine.promise.memory(2).transient_bytes > unaware
        assert +engine.traffic.bytes == +engine.promise.traffic(2).bytes


class Routed(Net):
    """Blocks of two sizes, called in an order that is given."""

    def __init__(self, calls: Sequence[int]) -> None:
        super().__init__(13, 0)
        self.calls = calls
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, n), nn.Linear(n, 13)) for n in (13, 99, 13, 99, 99, 13))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.calls:
            x = x + self.blocks[index](x)
        return self.head(x)


ANOTHER_ORDER = (1, 3, 4, 0, 2, 5)


@pytest.mark.parametrize("plan", ["zero2", "zero3", "shard_grad_op"])
@pytest.mark.parametrize(
    "calls",
    [ANOTHER_ORDER, (0, 1, 2, 3, 4, 5, 0), (0, 1, 2) * 3 + (3, 4, 5), tuple(range(6)) * 2, (3, 1)],
    ids=["another order", "one again at the end", "a loop", "all again", "some alone"],
)
def test_what_runs_otherwise_than_registered_is_billed_as_it_runs_from_then_on(
    calls: tuple[int, ...], plan: str
) -> None:
    with fake_group(4):
        model = Routed(calls)
        model, optimizer = tz.shard(model, adamw(model.parameters()), plan, units=["blocks.*"])
        engine = engine_of(model)
        said = r"another order than they are registered in: unit 'blocks\.1' before unit 'blocks\.0'"
        with pytest.warns(UserWarning, match=said) if calls == ANOTHER_ORDER else contextlib.nullcontext():
            _step(model, optimizer, 2, None)
        engine.tally.reset()
        _step(model, optimizer, 2, None)
        assert engine.peak_transient_bytes == engine.promise.memory(2).transient_bytes
        assert +engine.traffic.bytes == +engine.promise.traffic(2).bytes
        assert +engine.traffic.count == +engine.promise.traffic(2).count


def _gloo_peaks() -> list[tuple[int, int]]:
    plans = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
    return [
        _peak_and_promise(*tz.shard(Net(), adamw, plan), *case) for plan in plans for case in ((1, None), (2, True))
    ]


@pytest.mark.processes
def test_the_transient_peak_on_gloo(two_processes: Pool) -> None:
    for peaks in two_processes.run(_gloo_peaks):
        assert all(peak == promise for peak, promise in peaks), peaks


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_prefetch_and_the_transient_peak(plan: str, prefetch: int) -> None:
    with fake_group(8):
        model, optimizer = tz.shard(Net(depth=5), adamw, plan, mesh=mesh(plan), prefetch=prefetch)
        peak, promise = _peak_and_promise(model, optimizer, 1, None)
        assert peak == promise


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero3_holds_a_few_units_at_once(prefetch: int) -> None:
    """Forward: the root, the running unit and those gathered ahead.

    Backward: the root's weights and gradient, those of the running unit, and then either a gradient that is being
    reduced or the weights gathered ahead.
    """
    with fake_group(64):
        model, _optimizer = tz.shard(Net(depth=8), adamw, "zero3", prefetch=prefetch)
        engine = engine_of(model)
        root, unit = (engine.units[index].numel * 4 for index in (0, 1))
        loss = loss_of(model, batch())
        assert engine.peak_transient_bytes <= root + (1 + prefetch) * unit
        loss.backward()
        assert engine.peak_transient_bytes <= 2 * root + (2 + max(prefetch, 1)) * unit


class Probed(Net):
    """Calls `self.probe()` before each linear layer's forward and before its backward."""

    probe: Any = None

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_: self.probe())
                module.register_full_backward_pre_hook(lambda *_: self.probe())


@pytest.mark.parametrize("plan", ["zero1", "zero3", "shard_grad_op", "hybrid_shard", "hpz"])
def test_the_ledger_is_what_is_really_held(plan: str) -> None:
    """At every layer, forward and backward, live storages are the states plus the ledger, up to small activations."""
    width, slack_bytes = 128, 120_000
    readings = []
    with fake_group(8), census():
        model = Probed(width, 4)
        model, _optimizer = tz.shard(model, adamw, plan, mesh=mesh(plan))
        engine, at_rest = engine_of(model), live_bytes()
        model.probe = lambda: readings.append((live_bytes(), engine.tally.ledger.live_bytes))
        finished = [0, engine.bill.grad_bytes]
        loss_of(model, batch()).backward()
        del model.probe
    assert len(readings) == 2 * (2 * 4 + 1)
    assert max(held for _, held in readings) > 4 * slack_bytes
    for live, held in readings:
        assert finished[0] - 1 <= live - at_rest - held <= finished[1] + slack_bytes


# -- giving back -----------------------------------------------------------------------------------------------


def test_counting_anew_inside_of_a_forward_forgets_nothing_that_is_held() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Net())
        engine = engine_of(model)
        train(model, optimizer, 1, rank)
        handle = model.blocks[1].register_forward_hook(lambda *_: engine.tally.reset())
        train(model, optimizer, 1, rank)
        handle.remove()
        assert engine.tally.ledger.live_bytes == 0
        assert engine.peak_transient_bytes == engine.bill.transient_bytes

    on_ranks(2, body)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_deleting_frees_everything_at_once(plan: str) -> None:
    """Reference counts alone do it: the garbage collector is off inside `census`."""
    for precision in ("fp32", "bf16", "fp16"):
        with fake_group(8), census():
            model, optimizer = tz.shard(Net(), adamw, plan, precision=precision, mesh=mesh(plan))
            assert live_bytes() > 0
            del model, optimizer
            assert live_bytes() == 0
            model, optimizer = tz.shard(Net(), adamw, plan, precision=precision, mesh=mesh(plan))
            train(model, optimizer, 2, 0)
            with tz.accumulate(model):
                loss_of(model, batch()).backward()
            del model, optimizer
            assert live_bytes() == 0


def test_a_forward_that_raised_keeps_nothing() -> None:
    with fake_group(4), census():
        model, optimizer = tz.shard(Net(), adamw, "zero3")
        at_rest = live_bytes()
        with pytest.raises(IndexError):
            model(torch.full((2, 6), 99))
        assert live_bytes() == at_rest
        del model, optimizer
        assert live_bytes() == 0


def test_gathering_gives_back_what_it_took() -> None:
    with fake_group(4), census():
        model, _ = tz.shard(Net(), adamw, "zero3")
        at_rest = live_bytes()
        with tz.gathered(model) as parameters:
            assert live_bytes() > 3 * at_rest
            assert sum(p.numel() for p in parameters.values()) == sum(p.numel() for p in Net().parameters())
        del parameters
        assert live_bytes() == at_rest


def test_sharding_from_the_meta_device_never_holds_the_model() -> None:
    """Besides its shards a rank holds one unit at a time: its fresh parameters and their flat copy."""
    depth, world_size = 12, 64
    with torch.device("meta"):
        model = Net(64, depth)
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    unit_bytes = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    with fake_group(world_size), census(), PeakBytes() as peak:
        model, _ = tz.shard(model, None, "zero3")
        shards_bytes = engine_of(model).bill.weight_bytes
    assert peak.peak_bytes < whole_bytes / 3
    assert peak.peak_bytes < shards_bytes + 3 * unit_bytes


def test_memory_is_lent_as_it_was_when_its_reduction_began() -> None:
    """While the sum is under way, gradients of the next micro-batch may take memory of another kind."""

    def body(rank: int) -> list[bool]:
        model, _ = sharded(Net())
        gradient = engine_of(model).units[1].buckets[0].gradient
        moves, lent = (
            gradient.reduce(Divisor(), GradientFate.REDUCED),
            [],
        )  # of a unit that got none: its zeros are lent
        for number, step in enumerate(moves):
            if number == 0:
                parameter: Any = SimpleNamespace(grad=torch.ones(gradient.space.layout.slots[0].shape))
                gradient.accumulate(0, parameter, GradientFate.REDUCED)
            if isinstance(step, Released):
                lent.append(step.lent)
                step.release()
            else:
                step.wait()
        return lent

    assert [lent[0] for lent in on_ranks(2, body)] == [True, True]
