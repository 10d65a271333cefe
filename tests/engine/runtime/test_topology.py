"""Cores and threads of a rank's optimizer step, on hosts that are folders."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.engine.offload import store
from terrazzo.engine.offload.host_arena import HostArena
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.runtime import topology
from terrazzo.engine.runtime.topology import (
    bind_to,
    container_quota,
    numa_nodes,
    physical_cores,
    step_threads,
)
from terrazzo.engine.sharding import shard
from terrazzo.processes.cpus import allowed_cpus
from tests.engine.toys import Net, mesh_for, on_ranks


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@dataclass
class Host:
    """A host to be: nodes with cores each, hardware threads per core, and the node of each GPU.

    CPUs are numbered as Linux does on x86: the first hardware thread of every core, node by node, then the second ones.
    """

    root: Path
    monkeypatch: pytest.MonkeyPatch

    def build(self, nodes: int, cores: int, threads: int, gpus: Collection[int] = ()) -> Host:
        per_thread = nodes * cores
        for cpu in range(per_thread * threads):
            siblings = ",".join(str(cpu % per_thread + per_thread * thread) for thread in range(threads))
            write(self.root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        write(self.root / "devices/system/cpu/online", f"0-{per_thread * threads - 1}")
        for node in range(nodes):
            first = [per_thread * thread + node * cores for thread in range(threads)]
            cpus = ",".join(f"{start}-{start + cores - 1}" for start in first)
            write(self.root / f"devices/system/node/node{node}/cpulist", cpus)
        for index, node in enumerate(gpus):
            write(self.root / f"bus/pci/devices/0000:{index + 16:02x}:00.0/numa_node", str(node))
        self.allow(range(per_thread * threads))
        self.show_gpus(len(gpus))
        return self

    def allow(self, cpus: Collection[int]) -> None:
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    def show_gpus(self, count: int, first: int = 0) -> None:
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        self.monkeypatch.setattr(topology, "_pci_address", lambda index: f"0000:{index + first + 16:02x}:00.0")

    def group(self, files: Mapping[str, str], line: str = "0::/") -> None:
        """Put the process in a control group of version 2, or another one by its line in /proc/self/cgroup."""
        write(self.root.parent / "proc/self/cgroup", line)
        for name, text in files.items():
            write(self.root / "fs/cgroup" / name, text)

    def ranks(self, count: int) -> list[tuple[int, set[int]]]:
        found = [step_threads(torch.device("cuda", index), count, self.root) for index in range(count)]
        return [(threads, set(cpus)) for threads, cpus in found]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path / "sys", monkeypatch)


def span(start: int, stop: int) -> set[int]:
    return set(range(start, stop))


def test_a_cpu_rank_keeps_its_threads_and_is_not_bound(host: Host) -> None:
    host.build(nodes=2, cores=4, threads=2)
    torch.set_num_threads(3)
    assert step_threads(torch.device("cpu"), 8, host.root) == (3, frozenset())


def test_one_socket_with_two_threads_a_core(host: Host) -> None:
    host.build(nodes=1, cores=8, threads=2, gpus=[0, 0])
    assert physical_cores(range(16), host.root) == list(range(8))
    assert physical_cores([3, 11, 12], host.root) == [3, 12]
    assert host.ranks(1) == [(8, span(0, 8))]
    assert host.ranks(2) == [(4, span(0, 4)), (4, span(4, 8))]


def test_two_sockets_give_each_rank_cores_next_to_its_gpu(host: Host) -> None:
    host.build(nodes=2, cores=8, threads=2, gpus=[0, 0, 1, 1])
    assert numa_nodes(host.root) == {0: span(0, 8) | span(16, 24), 1: span(8, 16) | span(24, 32)}
    assert host.ranks(4) == [(4, span(0, 4)), (4, span(4, 8)), (4, span(8, 12)), (4, span(12, 16))]
    assert host.ranks(3) == [(4, span(0, 4)), (4, span(4, 8)), (8, span(8, 16))]


def test_gpus_that_alternate_between_sockets(host: Host) -> None:
    host.build(nodes=2, cores=6, threads=1, gpus=[0, 1, 0, 1])
    assert host.ranks(4) == [(3, span(0, 3)), (3, span(6, 9)), (3, span(3, 6)), (3, span(9, 12))]


def test_more_ranks_than_cores_have_a_thread_each(host: Host) -> None:
    host.build(nodes=1, cores=2, threads=2, gpus=[0] * 4)
    assert host.ranks(4) == [(1, {0}), (1, {1}), (1, {0}), (1, {1})]


@pytest.mark.parametrize("node", [-1, 7])
def test_a_gpu_without_a_node_may_use_every_core(host: Host, node: int) -> None:
    host.build(nodes=2, cores=4, threads=1, gpus=[node, node])
    assert host.ranks(2) == [(4, span(0, 4)), (4, span(4, 8))]


def test_a_gpu_that_torch_cannot_place(host: Host) -> None:
    host.build(nodes=1, cores=4, threads=1, gpus=[0])
    host.monkeypatch.undo()
    host.allow(range(4))
    host.monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    host.monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    assert host.ranks(1) == [(4, span(0, 4))]


def test_ranks_that_each_see_one_gpu_share_their_node(host: Host) -> None:
    """Which of the node's ranks this one is cannot be told, so it may wander over all of the node's cores."""
    host.build(nodes=2, cores=8, threads=2, gpus=[0, 0, 1, 1])
    host.show_gpus(1, first=2)
    assert step_threads(torch.device("cuda", 0), 4, host.root) == (4, frozenset(span(8, 16)))


def test_cores_that_a_launcher_bound_are_not_divided_again(host: Host) -> None:
    host.build(nodes=2, cores=8, threads=2, gpus=[0, 0, 1, 1])
    host.allow(span(4, 8) | span(20, 24))
    assert step_threads(torch.device("cuda", 1), 4, host.root) == (4, frozenset(span(4, 8)))


def test_a_node_that_a_launcher_bound_is_divided(host: Host) -> None:
    host.build(nodes=2, cores=8, threads=2, gpus=[0, 0, 1, 1])
    host.allow(span(8, 16) | span(24, 32))
    assert step_threads(torch.device("cuda", 3), 4, host.root) == (4, frozenset(span(12, 16)))


def test_cores_on_the_other_socket_are_better_than_none(host: Host) -> None:
    host.build(nodes=2, cores=8, threads=1, gpus=[0, 0])
    host.allow(span(8, 12))
    assert step_threads(torch.device("cuda", 0), 2, host.root) == (4, frozenset(span(8, 12)))


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"cpuset.cpus.effective": "4-7,20-23"}, "0::/"),
        ({"pods/one/cpuset.cpus.effective": "4-7,20-23", "cpuset.cpus.effective": "0-31"}, "0::/pods/one"),
        ({"cpuset.cpus.effective": "4-7,20-23"}, "0::/seen/from/outside"),
        ({"cpuset/cpuset.effective_cpus": "4-7,20-23"}, "5:cpu,cpuacct:/\n3:cpuset:/docker/abc\n1:name=systemd:/"),
    ],
)
def test_a_container_with_some_cores_divides_those(host: Host, files: dict[str, str], line: str) -> None:
    host.build(nodes=2, cores=8, threads=2, gpus=[0, 0])
    host.allow(span(4, 8) | span(20, 24))
    host.group(files, line)
    assert host.ranks(2) == [(2, {4, 5}), (2, {6, 7})]


@pytest.mark.parametrize(
    ("files", "line", "quota"),
    [
        ({"cpu.max": "max 100000"}, "0::/", math.inf),
        ({"cpu.max": "600000 100000"}, "0::/", 6),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 50000", "cpu.max": "700000 100000"}, "0::/a/b", 5),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", math.inf),
        ({"memory/cpu.max": "100000 100000"}, "4:memory:/", math.inf),
    ],
)
def test_a_quota_limits_the_threads(host: Host, files: dict[str, str], line: str, quota: float) -> None:
    host.build(nodes=1, cores=8, threads=1, gpus=[0, 0])
    host.group(files, line)
    assert container_quota(host.root) == quota
    assert host.ranks(2) == [(min(4, max(1, int(min(quota, 99) / 2))), cpus) for cpus in (span(0, 4), span(4, 8))]


def test_without_sys_every_allowed_cpu_is_a_core(host: Host) -> None:
    host.allow([2, 3, 5])
    host.show_gpus(1)
    assert numa_nodes(host.root) == {} and physical_cores([5, 2], host.root) == [2, 5]
    assert host.ranks(1) == [(3, {2, 3, 5})]


def test_a_node_without_cpus_is_none(host: Host) -> None:
    host.build(nodes=1, cores=2, threads=1)
    write(host.root / "devices/system/node/node1/cpulist", "")
    assert numa_nodes(host.root) == {0: {0, 1}}


def test_this_host_gives_what_the_system_says() -> None:
    cores = physical_cores(allowed_cpus())
    assert 1 <= len(cores) <= (os.cpu_count() or 1)
    assert topology.container_quota() > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_binding_holds_for_one_thread_and_those_it_starts() -> None:
    before = os.sched_getaffinity(0)
    chosen = {min(before)}
    found: list[object] = []

    def child() -> None:
        found.append(os.sched_getaffinity(0))

    def body() -> None:
        found.append(bind_to(chosen))
        child()
        inner = threading.Thread(target=child)
        inner.start()
        inner.join()

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [True, chosen, chosen]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", [[], [100_000]])
def test_binding_that_cannot_be_done_changes_nothing(cpus: list[int]) -> None:
    before = allowed_cpus()
    assert not bind_to(cpus)
    assert allowed_cpus() == before


@pytest.mark.skipif(len(allowed_cpus()) < 2, reason="a single CPU is no choice")
def test_host_memory_is_pinned_by_a_thread_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = allowed_cpus(), []
    nearest = frozenset([max(before)])

    def arena(size_bytes: int, pin_for: object) -> object:
        seen.append(allowed_cpus())
        return HostArena(size_bytes, None)

    monkeypatch.setattr(store, "step_threads", lambda device, ranks: (1, nearest))
    monkeypatch.setattr(store, "HostArena", arena)
    made = store.Store(torch.device("cpu"), Offload(), store.Need(cpu=(64,)), rank=0)
    made.grow([64])
    made.extra_host(64)
    assert seen == [nearest] * 3
    assert allowed_cpus() == before


@pytest.mark.parametrize("told", ["", "7"])
def test_ranks_of_a_host_count_each_other_where_no_launcher_tells(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four are on one host: their updates share its cores."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    monkeypatch.setattr(shard, "boot_id", lambda: "another" if dist.get_rank() == 2 else "one")
    monkeypatch.setattr(store, "step_threads", lambda device, ranks: (ranks, frozenset()))

    def body(rank: int) -> int:
        model, _ = tz.shard(Net(), None, "hfsdp@cpu-all", mesh=mesh_for("hfsdp", 4))
        return engine_of(model).store.step_threads[0]

    assert on_ranks(4, body) == ([7] * 4 if told else [3, 3, 1, 3])
