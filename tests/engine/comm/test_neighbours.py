"""Ranks on one machine that read each other's memory: who can, and what happens when one is gone."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.host import neighbours
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.comm.host.neighbours import Memory, find_neighbours
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import ConnectionLost, RanksApart
from tests.engine.comm.test_collectives import (
    check_all_gather,
    check_all_reduce,
    check_everything,
    check_reduce_scatter,
)
from tests.helpers import programs
from tests.helpers.processes import Pool, RankFailed

MORE_THAN_A_BLOCK = (1 << 20) // 4 + 63


def along_world() -> GlooCollectives:
    found = collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), Ledger())
    assert isinstance(found, GlooCollectives)
    return found


def near_ranks() -> set[int]:
    return set(find_neighbours(dist.get_rank(), range(2), along_world().gather_rows, ["a", "b"], 10.0))


def on_machine_of_its_own(rank: int) -> int:
    """Ranks 0 and 1 share a machine."""
    return 1 if rank < 2 else rank


def check_large_and_small() -> None:
    along = along_world()
    for chunk in (1, 17, MORE_THAN_A_BLOCK):
        check_all_gather(along, chunk, torch.bfloat16)
        check_reduce_scatter(along, chunk, torch.float32, torch.float32)
        check_reduce_scatter(along, chunk, torch.bfloat16, torch.float32)
        check_all_reduce(along, chunk, torch.float32, torch.float32, 3)


def mixed_machines() -> tuple[set[int], int]:
    machine = on_machine_of_its_own(dist.get_rank())
    with patch.object(neighbours, "_machine", lambda: machine):
        check_large_and_small()
        return near_ranks(), along_world().receive_bytes(3 * (4 << 20))


def switched_off() -> set[int]:
    with patch.dict("os.environ", {"TERRAZZO_PEER_MEMORY": "0"} if dist.get_rank() == 1 else {}):
        check_large_and_small()
        check_everything()
        return near_ranks()


def peak_of_a_reduction() -> tuple[int, int]:
    ledger = Ledger()
    full = torch.ones(2 * MORE_THAN_A_BLOCK)
    along = collectives_for(dist.group.WORLD, torch.device("cpu"), Traffic(), ledger)
    Transfer(along.reduce_scatter(full, torch.float32)).finish()
    return ledger.peak_bytes, ledger.live_bytes


@pytest.mark.processes
def test_processes_of_one_machine_read_each_other(two_processes: Pool) -> None:
    assert two_processes.run(near_ranks) == [{1}, {0}]
    two_processes.run(check_large_and_small)


@pytest.mark.processes
def test_one_rank_can_switch_it_off_for_both(two_processes: Pool) -> None:
    assert two_processes.run(switched_off) == [set(), set()]


@pytest.mark.processes
def test_summing_needs_a_block_and_not_a_chunk(two_processes: Pool) -> None:
    assert two_processes.run(peak_of_a_reduction) == [(1 << 20, 0)] * 2


@pytest.mark.processes
def test_one_axis_may_span_near_and_far_ranks() -> None:
    chunk, block = 4 << 20, 1 << 20
    with Pool(3) as pool:
        assert pool.run(mixed_machines) == [({1}, chunk + block), ({0}, chunk + block), (set(), 2 * chunk)]


def test_reads_another_process() -> None:
    code = (
        "import time, torch; from terrazzo.engine.comm.host import neighbours; neighbours._permission.hold();"
        "t = torch.arange(100_000); print(t.data_ptr(), flush=True); time.sleep(60)"
    )
    child = programs.Program("-c", code)
    memory = Memory(child.pid, int(child.stdout.readline()))
    found = memory.read(8 * 1000, torch.zeros(50_000, dtype=torch.int64))
    assert torch.equal(found, torch.arange(1000, 51_000))
    assert memory.read(0, torch.zeros(0)).numel() == 0
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with pytest.raises(
        ConnectionError, match="memory of another process cannot be read: No such process; it has ended"
    ):
        memory.read(0, torch.zeros(1))
    with pytest.raises(ConnectionError, match="Bad address"):
        Memory(os.getpid(), 16).read(0, torch.zeros(1))


def meet(sizes: tuple[int, int]) -> str:
    """What a gather of `sizes[rank]` elements per rank ends with, then a further one."""
    along = along_world()
    endings = []
    for _ in range(2):
        try:
            Transfer(along.all_gather(torch.zeros(2 * sizes[dist.get_rank()]))).finish()
            endings.append("done")
        except (RanksApart, ConnectionLost) as error:
            endings.append(str(error))
    return " | ".join(endings)


@pytest.mark.processes
def test_ranks_that_run_different_things_fail_and_do_not_read_on(two_processes: Pool) -> None:
    assert two_processes.run(meet, (8, 8)) == ["done | done"] * 2
    endings = two_processes.run(meet, (8, 16))
    assert any("have not run the same" in ending for ending in endings)
    assert not any("done" in ending for ending in endings)
    two_processes.close()  # their connections have broken


def die_or_wait(path: str) -> str:
    """Rank 1 dies inside an exchange; what rank 0 then sees goes into a file, since its pool is closed."""
    along = along_world()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        Transfer(along.all_gather(torch.zeros(16)), Label(Purpose.OUTER, number=3)).finish()
    except ConnectionLost as error:
        notes = getattr(error, "__notes__", [])  # no traceback of a thread: the message is enough
        Path(path).write_text(f"{error} {notes} {time.monotonic() - begun < 10}")
    return "done"


@pytest.mark.processes
def test_a_rank_whose_neighbour_dies_fails_at_once(tmp_path: Path) -> None:
    with Pool(2) as pool, pytest.raises(RankFailed):
        pool.run(die_or_wait, str(tmp_path / "ending"), timeout_s=20)
    said = "Rank 1 has ended or failed: see what it has printed. Here it was the turn of outer step 3. [] True"
    assert (tmp_path / "ending").read_text() == said


def short_timeout() -> bool:
    """A group's own timeout holds between neighbours."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    along = collectives_for(group, torch.device("cpu"), Traffic(), Ledger())
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError, match="has not come to this gather in time"):
            Transfer(along.all_gather(torch.zeros(16))).finish()
    dist.barrier()
    return True


@pytest.mark.processes
def test_the_groups_timeout_holds(two_processes: Pool) -> None:
    assert all(two_processes.run(short_timeout))


class Routed(nn.Module):
    """Four blocks, each of which a rank may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for index in route:
            x = x + self.blocks[index](x)
        return x


def train_on_routes(plan: str) -> list[float]:
    """Ranks on a diagonal of the mesh run a block that the others skip, each block in turn; sums of the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model, optimizer = tz.shard(Routed(), lambda p: torch.optim.SGD(p, lr=0.1), plan, units=["blocks.*"], mesh=mesh)
    for step in range(8):
        skipped = step % 4 if dist.get_rank() in (1, 2) else -1
        model(torch.ones(2, 32), [index for index in range(4) if index != skipped]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with tz.gathered(model) as weights:
        return [weight.double().sum().item() for weight in weights.values()]


@pytest.mark.processes
def test_ranks_that_skip_a_unit_issue_the_same_collectives() -> None:
    with Pool(4) as pool:
        for plan in ("hybrid_shard", "zero3"):
            first, *others = pool.run(train_on_routes, plan, timeout_s=60)
            assert all(found == first for found in others)


def of_other_sizes() -> list[str]:
    """What a rank hears whose chunk is longer than the other's, by memory and by sockets; run by each process."""
    said = []
    for near in ("1", "0"):
        with patch.dict(os.environ, {"TERRAZZO_PEER_MEMORY": near}):
            along = collectives_for(dist.new_group(), torch.device("cpu"), Traffic(), Ledger())
        with pytest.raises(RanksApart) as apart:
            Transfer(along.all_gather(torch.zeros(2 * (8 + dist.get_rank()))), Label(Purpose.OUTER, number=3)).finish()
        said.append(str(apart.value))
        dist.barrier()
    return said


@pytest.mark.processes
def test_chunks_of_other_sizes_are_refused_before_they_are_read() -> None:
    """Gloo ends a process when a message is longer than the place for it."""
    with Pool(2) as pool:
        for of_rank in pool.run(of_other_sizes):
            for said in of_rank:
                places = "rank 0 at outer step 3 (32 bytes); rank 1 at outer step 3 (36 bytes). Every rank must run"
                assert places in said, said
