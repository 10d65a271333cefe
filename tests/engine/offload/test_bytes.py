"""What states on other tiers cost: promised before anything is allocated, and then found to the byte."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.engine import engine_of, estimate
from tests.engine.census import census, live_bytes
from tests.engine.offload.runs import SMALL_BLOCK, TIERS
from tests.engine.test_memory import PRECISIONS, Awkward, mesh
from tests.engine.toys import EVERY_PLAN, Net, adamw, batch, loss_of, mesh_for, on_ranks, train
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

PAGE_BYTES = 4096
CASES = [(1, None), (3, True), (3, False)]


def placed(plan: str, tiers: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Arguments of `tz.shard`."""
    options = {"block_mib": SMALL_BLOCK, "depth": 2, "direct": False, **settings}
    placed = tz.Plan.named(plan).on(**TIERS[tiers])
    return {"plan": placed, "offload": tz.Offload(path=folder, **options).used_under(placed)}


def built(model: nn.Module, plan: str, tiers: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    return tz.shard(model, optimizer, mesh=mesh(plan), **placed(plan, tiers, folder), **options)


def a_step(model: Any, optimizer: Any, micro_batches: int = 1, local: bool | None = None) -> None:
    for micro in range(micro_batches):
        with contextlib.nullcontext() if micro == micro_batches - 1 else tz.accumulate(model, local=local):
            loss_of(model, batch(micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
    engine_of(model).settle()


def landed(model: Any) -> None:
    """Finished gradients are where they rest."""
    for bucket in engine_of(model).trainable():
        bucket.gradient.finished.sum.wait()


def check_states(kind: type[nn.Module], plan: str, tiers: str, precision: Any, folder: Path) -> None:
    """Storages that are live beside those of before, at each point of a step; host memory is one of them here."""
    model = kind()
    before = live_bytes() - sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer = built(model, plan, tiers, folder, units=["blocks.*"], precision=precision)
    engine = engine_of(model)
    bill, usage = engine.bill, engine.store.usage()
    at_rest = before + bill.weight_bytes + bill.master_bytes + bill.host_bytes + bill.residual_bytes
    assert (usage["host_bytes"], usage["disk_bytes"]) == (bill.host_bytes, bill.disk_bytes)
    assert live_bytes() == at_rest
    loss_of(model, batch()).backward()
    landed(model)
    assert live_bytes() == at_rest + bill.grad_bytes
    optimizer.step()
    engine.settle()
    apart = [segment for segment in next(iter(engine.drivers)).segments if segment.bucket.spec.updated_off_device]
    counts = len(apart) * torch.float32.itemsize  # AdamW's step, of each segment that is updated elsewhere
    assert live_bytes() == at_rest + bill.grad_bytes + bill.moments_bytes + counts
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch())
    assert live_bytes() == at_rest + bill.moments_bytes + counts
    check_files(engine, bill.disk_bytes)


def check_files(engine: Any, disk_bytes: int) -> None:
    """They have the promised size, take it on the disk, and nothing of them or of host memory is left over."""
    for arena in engine.store.arenas:
        with pytest.raises(tz.Misuse):
            arena.allocate(1)
    if not disk_bytes:
        assert engine.store.nvme is None
        return
    disk = engine.store.nvme.swap
    found = [path.stat() for path in disk.paths]
    assert sum(stat.st_size for stat in found) == disk_bytes
    assert sum(stat.st_blocks for stat in found) * 512 >= disk_bytes
    with pytest.raises(tz.Misuse):
        disk.reserve(1)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_states_equal_the_bill_to_the_byte(plan: str, tiers: str, tmp_path: Path) -> None:
    turn = list(EVERY_PLAN).index(plan) + list(TIERS).index(tiers)
    precision = list(PRECISIONS.values())[turn % len(PRECISIONS)]
    for rank, kind in ((0, Awkward), (7, Net)):
        with fake_group(8, rank), census():
            check_states(kind, plan, tiers, precision, tmp_path)


@pytest.mark.parametrize("tiers", TIERS)
def test_the_estimate_is_the_bill_and_allocates_nothing(tiers: str, tmp_path: Path) -> None:
    with fake_group(8):
        with census(), torch.device("meta"):
            estimated = estimate(Net(), adamw, **placed("zero3", tiers, tmp_path))
            assert live_bytes() == 0
        assert not list(tmp_path.iterdir())
        assert engine_of(built(Net(), "zero3", tiers, tmp_path)[0]).bill == estimated
        assert ("host memory" in estimated.table()) == bool(estimated.host_bytes)
        assert ("files" in estimated.table()) == bool(estimated.disk_bytes)


def combinations() -> Iterator[Any]:
    tiers = itertools.cycle(TIERS)
    precisions = itertools.cycle(PRECISIONS)
    for plan in EVERY_PLAN:
        for number in range(4):
            marks = [pytest.mark.long] if number != len(plan) % 2 else []
            yield pytest.param(plan, next(tiers), next(precisions), marks=marks)


MORE_PROMISED = {
    ("hfsdp", "weight on nvme", "gathered in int8"): 4096,
    ("hfsdp", "weight on nvme", "sums in int4"): 8192,  # gathered in int8 too, from fp32
}
"""Bytes that the bill has too many: it has weights encoded as their gather begins, and from files they have come only
when the unit before has been released.
"""


@pytest.mark.parametrize(("plan", "tiers", "precision"), [*combinations()])
def test_the_transient_peak_and_the_traffic_are_as_promised(
    plan: str, tiers: str, precision: str, tmp_path: Path
) -> None:
    with fake_group(8):
        for micro_batches, local in CASES:
            if local is False and plan in ("zero0", "zero1"):
                continue
            model, optimizer = built(Net(), plan, tiers, tmp_path, precision=PRECISIONS[precision])
            engine = engine_of(model)
            bill = engine.promise.memory(micro_batches, local)
            told = engine.promise.traffic(micro_batches=micro_batches, local=local)
            a_step(model, optimizer, micro_batches, local)  # in the first step ranks also agree on an order
            engine.traffic.reset()
            a_step(model, optimizer, micro_batches, local)
            more = MORE_PROMISED.get((plan, tiers, precision), 0)
            assert engine.peak_transient_bytes == bill.transient_bytes - more, (micro_batches, local)
            assert engine.store.usage()["host_bytes"] == bill.host_bytes, (micro_batches, local)
            assert engine.tally.ledger.live_bytes == 0
            assert {k: n for k, n in engine.traffic.bytes.items() if n} == {k: n for k, n in told.bytes.items() if n}
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                assert engine.traffic.count[kind] == told.count[kind], kind


@pytest.mark.parametrize(("plan", "tiers"), [("zero1", "nvme-all"), ("zero3", "cpu-all"), ("hpz", "all on nvme")])
def test_the_transient_peak_of_overlapped_steps_on_real_ranks(plan: str, tiers: str, tmp_path: Path) -> None:
    """New weights are on their way while the first units run."""
    base = Net()

    def body(rank: int) -> tuple[int, int]:
        model = copy.deepcopy(base)
        options = {"mesh": mesh_for(plan, 4), "precision": "bf16", **placed(plan, tiers, tmp_path)}
        model, optimizer = tz.shard(model, adamw(model.parameters()), **options)
        train(model, optimizer, 4, rank)
        engine = engine_of(model)
        engine.settle()
        return engine.peak_transient_bytes, engine.bill.transient_bytes

    assert all(peak == promise for peak, promise in on_ranks(4, body))


# -- drives ----------------------------------------------------------------------------------------------------


def pages(numel: int, itemsize: int, cell: int = 4096) -> int:
    """Bytes of a state in files, its cells each in whole pages."""
    whole, rest = divmod(numel, cell)
    return whole * cell * itemsize + -(-rest * itemsize // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_state_in_files_is_read_and_written_once_by_an_update(precision: str, tmp_path: Path) -> None:
    """And weights are read for forward and for backward, but those of the root once."""
    ranks, width = 4, 160
    with fake_group(ranks):
        model, optimizer = built(Net(width, 2), "zero3", "all on nvme", tmp_path, precision=precision)
        engine = engine_of(model)
        numels = [unit.numel // ranks for unit in engine.units]
        assert max(numels) > 2 * 4096
        state = sum(pages(numel, 4) for numel in numels)
        weights = [pages(numel, 4 if precision == "fp32" else 2) for numel in numels]
        own = 0 if precision == "fp32" else sum(weights)  # else the weight is the master itself
        a_step(model, optimizer)
        before = engine.store.usage()
        a_step(model, optimizer)
        after = engine.store.usage()
    assert after["read_bytes"] - before["read_bytes"] == 4 * state + 2 * sum(weights) - weights[0]
    assert after["written_bytes"] - before["written_bytes"] == 4 * state + own
    assert after["stepped_numel"] - before["stepped_numel"] == sum(numels)


def test_blocks_of_several_folders_are_spread_evenly(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with fake_group(1):
        model, optimizer = built(Net(160, 2), "zero3", "all on nvme", folders)  # type: ignore[arg-type]
        a_step(model, optimizer)
        sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
        assert sum(sizes) == engine_of(model).bill.disk_bytes
        assert max(sizes) - min(sizes) <= PAGE_BYTES
