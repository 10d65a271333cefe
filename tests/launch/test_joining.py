"""Ranks that meet at an address: one that cannot be used, ranks that come late, and ranks that never come."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from terrazzo.config import LaunchConfig
from terrazzo.errors import BadInput
from terrazzo.launch.environment import adopt_slurm
from terrazzo.launch.machine import cuda_index
from terrazzo.launch.rank import rendezvous
from terrazzo.launch.rank.process_group import join
from terrazzo.launch.rank.rendezvous import meet, waiting_is_said
from tests.helpers import programs


@contextmanager
def bound(port: int) -> Iterator[socket.socket]:
    """A socket at this port, or at a free one for 0. As long as it is there no other process is given the port.

    It does not listen, so that nobody reaches it and whoever knows the port can open it.
    """
    with socket.socket(socket.AF_INET6) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("::", port))
        yield opened


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free one, which MASTER_PORT names."""
    with bound(0) as reserved:
        number: int = reserved.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(number))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield number


def test_an_address_that_cannot_be_used_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=rf"Rank 1 cannot reach localhost:{port}, .*MASTER_PORT"):
        meet(1, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(BadInput, match="cannot open localhost:70000"):
        meet(0, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(BadInput, match="cannot open localhost:many"):
        meet(0, 2, 0.3)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with bound(port) as taken:
        taken.listen()
        with pytest.raises(BadInput, match=rf"Rank 0 cannot open localhost:{port}.*in use") as caught:
            meet(0, 2, 0.3)
    assert "\n" not in str(caught.value)


def all_meet(ranks: dict[int, float], world_size: int, timeout_s: float) -> dict[int, str]:
    """How ranks fare that come after so many seconds."""
    met = threading.Barrier(len(ranks))

    def come(rank: int) -> str:
        time.sleep(ranks[rank])
        try:
            store = meet(rank, world_size, timeout_s)
        except BadInput as error:
            return str(error)
        store.set(f"seen/{rank}", "1")
        store.wait([f"seen/{number}" for number in ranks])
        met.wait(120)  # the first rank's store is the others'
        return "met"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(come, ranks), strict=True))


def test_ranks_that_come_late_are_waited_for(port: int) -> None:
    assert set(all_meet({0: 0.2, 1: 0.0, 2: 0.5}, 3, 120.0).values()) == {"met"}


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    for said in all_meet({0: 0.0, 2: 0.1, 4: 0.0}, 5, 3.0).values():
        assert said.startswith(f"Ranks 1, 3 have not come to localhost:{port}, ")


@pytest.mark.parametrize("sizes", [{0: 2, 1: 3, 2: 3}, {0: 3, 1: 2}])
def test_ranks_that_were_told_different_world_sizes_refuse_soon(
    port: int, sizes: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_OTHERS_ARE_NEAR_S", 1.0)

    def come(rank: int) -> str:
        with pytest.raises(BadInput) as refused:
            meet(rank, sizes[rank], 600.0)  # longer than the test may take
        return str(refused.value)

    with ThreadPoolExecutor(len(sizes)) as pool:
        (said,) = set(pool.map(come, sizes))
    assert said.startswith(f"WORLD_SIZE is {sizes[0]} on rank 0 and {sizes[1]} on rank")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "abc", "RANK is 'abc', expected a whole number from 0 on"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0', expected a whole number from 1 on"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is '-1', expected"),
        ("LOCAL_WORLD_SIZE", "1.5", "LOCAL_WORLD_SIZE is '1.5', expected"),
        ("RANK", "2", "RANK is 2 and WORLD_SIZE is 2: ranks count from 0 to 1"),
    ],
)
def test_a_place_that_is_no_number_is_named(
    port: int, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for variable, number in (place | {name: value}).items():
        monkeypatch.setenv(variable, number)
    with pytest.raises(BadInput, match=words):
        join(LaunchConfig(device="cpu"))


def test_a_slurm_task_that_is_not_told_its_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    slurm = {"PROCID": "0", "STEP_ID": "0", "STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "2,1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(BadInput, match=r"'2,1' tasks on its nodes, and SLURM_NODEID"):
        adopt_slurm()


@pytest.fixture
def agents(port: int, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of torchrun's agents, which stays while the ranks are started again."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous, "_LOOK_AGAIN_S", 0.05)
    return dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def test_ranks_that_were_started_again_do_not_take_the_earlier_ones_for_each_other(
    port: int, agents: dist.Store
) -> None:
    everyone = {0: 0.0, 1: 0.0, 2: 0.0}
    assert set(all_meet(everyone, 3, 120.0).values()) == {"met"}
    for late in (0, 2):
        assert set(all_meet(everyone | {late: 0.3}, 3, 120.0).values()) == {"met"}
    for said in all_meet({0: 0.2, 1: 0.0}, 3, 3.0).values():
        assert said.startswith(f"Rank 2 has not come to localhost:{port}, ")
    assert set(all_meet(everyone, 3, 120.0).values()) == {"met"}


def test_what_the_earlier_ones_have_stored_is_not_found(agents: dist.Store) -> None:
    for _ in range(2):
        store = meet(0, 1, 120.0)
        assert not store.check(["key"])
        store.set("key", "value")


def test_no_two_ranks_get_one_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torchrun --nproc-per-node 8` starts them on 4 GPUs. Slurm may show each of 8 tasks a single one."""
    monkeypatch.setattr("terrazzo.engine.runtime.device.count", lambda: 4)
    assert [cuda_index(rank) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(BadInput, match=r"Rank 4 .* has 4 CUDA devices and each rank needs its own: start 4 ranks"):
        cuda_index(4)
    monkeypatch.setattr("terrazzo.engine.runtime.device.count", lambda: 1)
    assert cuda_index(7) == 0


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_ends_at_a_signal(number: int, port: int, tmp_path: Path) -> None:
    """It waits in C++, where Python calls no handlers."""
    (tmp_path / "a.yaml").write_text("launch: {device: cpu}\n")
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    program = programs.Program("-m", "terrazzo", "train", str(tmp_path / "a.yaml"), env={**os.environ, **place})
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    store.wait(["run"])  # which it sets before it waits
    time.sleep(0.5)
    start = time.monotonic()
    os.kill(program.pid, number)
    done = program.communicate(20)
    assert time.monotonic() - start < 2
    assert (done.returncode, done.stderr) == (128 + number, "Ended before training began: nothing is lost.\n")


def test_a_rank_that_waits_says_so(
    monkeypatch: pytest.MonkeyPatch, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SAY_AFTER_S", 0.1)
    for local_rank in (0, 1):
        with waiting_is_said(16, 600.0, local_rank):
            time.sleep(0.5)
    said = f"Waiting for the other ranks of 16 at localhost:{port}, up to launch.timeout_s=600.\n"
    assert capfd.readouterr().err == said
