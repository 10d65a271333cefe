"""Collectives along one mesh axis: what they compute, in which order they sum, and what they count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine.buckets.gradients.gradient import _TAGS
from terrazzo.engine.comm import backends, tags
from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.failed_exchanges import MeshGroups
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.comm.transfer import Handle, Transfer
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.mesh.axes import Axes
from terrazzo.parallel.pipeline.messages import Messages
from terrazzo.parallel.pipeline.schedules import Action, ActionKind
from tests.engine.toys import on_ranks
from tests.helpers.fake import fake_group
from tests.helpers.processes import Pool

SIZES = (1, 7, 17 * 257, 64)  # elements of one rank's chunk
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def along_world() -> Collectives:
    return collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), Ledger())


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` contributes; every process can make every rank's."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)


def sum_in_rank_order(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def check_all_gather(along: Collectives, chunk: int, dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    full = torch.full((world * chunk,), 99).to(dtype)
    full.view(world, chunk)[rank].copy_(values(rank, chunk, dtype))
    found = Transfer(along.all_gather(full)).finish()
    assert found.data_ptr() == full.data_ptr()
    assert torch.equal(found, torch.cat([values(r, chunk, dtype) for r in range(world)]))


def check_reduce_scatter(along: Collectives, chunk: int, wire: torch.dtype, dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    found = Transfer(along.reduce_scatter(values(rank, world * chunk, wire), dtype)).finish()
    everyone = sum_in_rank_order([values(r, world * chunk, wire) for r in range(world)], dtype)
    assert found.dtype == dtype
    assert torch.equal(found, everyone.view(world, chunk)[rank])


def check_all_reduce(along: Collectives, chunk: int, wire: torch.dtype, dtype: torch.dtype, denominator: float) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    found = Transfer(along.all_reduce(values(rank, world * chunk, wire), dtype, denominator)).finish()
    everyone = sum_in_rank_order([values(r, world * chunk, wire) for r in range(world)], dtype)
    before = world if wire == torch.float16 else denominator  # what is sent back is divided by so much, the mean by all
    assert found.dtype == dtype
    assert torch.equal(found, (everyone / before).to(wire).to(dtype) / (denominator / before))


def check_everything() -> bool:
    along = along_world()
    for chunk in SIZES:
        for dtype in DTYPES:
            check_all_gather(along, chunk, dtype)
        for wire in (torch.float32, torch.bfloat16, torch.float16):
            check_reduce_scatter(along, chunk, wire, torch.float32)
            check_reduce_scatter(along, chunk, wire, wire)
            check_all_reduce(along, chunk, wire, torch.float32, 1)
            check_all_reduce(along, chunk, wire, torch.float32, 3)
    return True


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_on_threads(world_size: int) -> None:
    assert all(on_ranks(world_size, lambda rank: check_everything()))


@pytest.mark.processes
def test_on_gloo(two_processes: Pool) -> None:
    assert all(two_processes.run(check_everything))


def test_a_backend_whose_order_of_sums_is_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(2):
        monkeypatch.setattr(backends, "backend_of", lambda group, device: "ucc")
        with pytest.raises(tz.BadInput, match=r"cpu is 'ucc'.*gloo, nccl.*init_process_group"):
            along_world()


def test_at_64_ranks() -> None:
    def body(rank: int) -> None:
        along = along_world()
        check_all_gather(along, 17, torch.float32)
        check_reduce_scatter(along, 17, torch.float32, torch.float32)

    on_ranks(64, body)


def test_sums_run_in_rank_order() -> None:
    """1e8 + 3 - 1e8 - 3 depends on the order: each rank must get the same bits as a loop over ranks."""
    parts = [torch.full((8,), value) for value in (1e8, 3.0, -1e8, -3.0)]
    one_by_one = ((parts[0] + parts[1]) + parts[2]) + parts[3]

    def body(rank: int) -> tuple[Tensor, Tensor]:
        scattered = Transfer(along_world().reduce_scatter(parts[rank].clone(), torch.float32)).finish()
        return scattered, Transfer(along_world().all_reduce(parts[rank].clone(), torch.float32, 1)).finish()

    assert not torch.equal(one_by_one, torch.zeros(8))
    for scattered, reduced in on_ranks(4, body):
        assert torch.equal(scattered, one_by_one[:2])
        assert torch.equal(reduced, one_by_one)


def test_bf16_payloads_are_summed_in_fp32() -> None:
    """256 + 1 is 256 in bf16: eight ranks' ones survive only in a wider sum."""
    contributions = [256.0] + [1.0] * 7

    def body(rank: int) -> Tensor:
        payload = torch.full((8,), contributions[rank], dtype=torch.bfloat16)
        return Transfer(along_world().reduce_scatter(payload, torch.float32)).finish()

    assert all(found.item() == 263.0 for found in on_ranks(8, body))


def _counted(kind: str, dtype: torch.dtype, numel: int) -> tuple[int, int, float]:
    along = along_world()
    full = torch.zeros(numel, dtype=dtype)
    arguments = {"all_gather": (full,), "reduce_scatter": (full, torch.float32), "all_reduce": (full, torch.float32, 1)}
    Transfer(getattr(along, kind)(*arguments[kind])).finish()
    assert set(along.traffic.count) == {kind}
    return along.traffic.count[kind], along.traffic.bytes[kind], along.traffic.wait_s


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
@pytest.mark.parametrize(("kind", "factor"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
@pytest.mark.parametrize("world_size", [2, 8, 1024])
def test_bytes_are_counted_by_kind(kind: str, factor: int, dtype: torch.dtype, itemsize: int, world_size: int) -> None:
    numel = 1024 * 5
    with fake_group(world_size):
        count, sent, wait_s = _counted(kind, dtype, numel)
    assert (count, sent) == (1, factor * numel * itemsize // world_size * (world_size - 1))
    assert wait_s >= 0


def test_threads_count_the_same_bytes_as_the_simulation() -> None:
    for kind, factor in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        for count, sent, _ in on_ranks(4, lambda rank, kind=kind: _counted(kind, torch.float32, 4 * 7)):
            assert (count, sent) == (1, factor * 7 * 3 * 4)


def test_control_messages_have_their_own_kind() -> None:
    def body(rank: int) -> tuple[list[int], Tensor, Tensor, dict[str, int]]:
        along = along_world()
        highest = along.maximum(torch.tensor([rank, -rank]))
        rows = along.gather_rows(torch.tensor([float(rank), 7.0]))
        first = torch.tensor([float(rank + 1)])
        along.broadcast(first)
        return highest.tolist(), rows, first, dict(along.traffic.count)

    for highest, rows, first, count in on_ranks(3, body):
        assert highest == [2, 0]
        assert torch.equal(rows, torch.tensor([[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]))
        assert first.item() == 1.0
        assert count == {"control": 2, "broadcast": 1}


def test_a_transfer_has_one_collective_in_flight() -> None:
    log: list[str] = []

    class Logged(Handle):
        def __init__(self, name: str) -> None:
            super().__init__(Traffic(), [])
            self.name = name
            log.append(f"start {name}")

        def wait(self) -> None:
            log.append(f"wait {self.name}")

    def moves() -> Any:
        yield Logged("a")
        yield Logged("b")
        return torch.tensor(5)

    transfer = Transfer(moves())
    assert log == ["start a"] and not transfer.done
    transfer.advance()
    assert log == ["start a", "wait a", "start b"] and not transfer.done
    assert transfer.finish().item() == 5
    assert log[-1] == "wait b" and transfer.done
    assert transfer.finish().item() == 5


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_no_message_has_the_tag_of_another_kind(kind: str) -> None:
    """Gloo ends a process when a message is longer than its place."""
    group: Any = SimpleNamespace(
        label=Label(), links=SimpleNamespace(mesh_groups=MeshGroups()), _counts={"gather": 0, "reduce": 0}
    )
    links: Any = SimpleNamespace(_begun=511, _stages=8)
    last, first = Action(7, ActionKind.BACKWARD, 999), Action(0, ActionKind.FORWARD, 0)
    stamps = [GlooCollectives._stamp(group, kind) for _ in range(1000)]
    exchanges = {tag for stamp in stamps for tag in (stamp.first, stamp.then(8))}
    others = [Messages._tag(links, each, header) for each in (first, last) for header in (False, True)]
    others += [*_TAGS.values(), tags.WRITTEN_WEIGHTS, tags.NEVER_SENT]
    assert len({*others}) == 8
    assert max(exchanges) < tags.EXCHANGES.stop <= min(others)
    assert max(others) < 2**31


def test_traffic_is_reset_and_totalled() -> None:
    traffic = Traffic()
    traffic.record("all_gather", 10)
    traffic.record("all_gather", 5)
    traffic.record("reduce_scatter", 1, count=3)
    assert (dict(traffic.count), traffic.total_bytes) == ({"all_gather": 2, "reduce_scatter": 3}, 16)
    traffic.reset()
    assert (traffic.total_bytes, traffic.wait_s) == (0, 0.0)


def test_a_broadcast_over_two_axes_crosses_the_outer_one_once() -> None:
    def body(rank: int) -> tuple[float, int]:
        tally = Tally()
        axes = Axes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), tally)
        values = torch.tensor([float(rank + 5)])
        axes.broadcast(values, axes.data)
        return values.item(), tally.traffic.count["broadcast"]

    assert on_ranks(4, body) == [(5.0, 2), (5.0, 1), (5.0, 2), (5.0, 1)]
