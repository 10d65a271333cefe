"""How things end: garbage found at any moment and in any thread, the exit of a process, and its forks."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.storage.lock import Lock
from terrazzo.engine import engine_of
from terrazzo.engine.comm.host.neighbours import Neighbour
from terrazzo.processes import ending
from terrazzo.processes.ending import Ending
from tests.checkpoint.faults import reap, spawn_child
from tests.engine.offload.runs import SMALL_BLOCK, TIERS
from tests.engine.toys import adamw
from tests.helpers.fake import fake_group
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.alone  # what garbage collection meets must be of these tests alone


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def ours() -> list[str]:
    """Threads of this project's, without the one that stays."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("terrazzo") and name != "terrazzo-reaper")


def built(folder: Path, tiers: dict[str, str] | None, with_optimizer: bool = True) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 64))
    plan = tz.Plan.named("zero3").on(**(tiers or {}))
    offload = tz.Offload(path=folder, block_mib=SMALL_BLOCK, depth=2, direct=False).used_under(plan)
    optimizer = adamw(model.parameters()) if with_optimizer else None
    return tz.shard(model, optimizer, plan, units=[nn.Linear], offload=offload, precision="bf16")


def step(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 8)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def by_state(tiers: dict[str, str] | None) -> dict[str, object]:
    """Axes of a cover: the tier of each state."""
    return {state: (tiers or {}).get(state) for state in ("weight", "grad", "optim")}


class Owner:
    """Something with an end."""


@pytest.fixture(scope="module", autouse=True)
def _the_first_optimizer() -> None:
    """With it torch imports its compiler, which keeps the frames that did so until the next collection."""
    adamw([nn.Parameter(torch.zeros(1))])


# -- garbage -----------------------------------------------------------------------------------------------------------


def test_what_is_gone_is_ended_by_another_thread_once() -> None:
    ended: list[str] = []
    owner, closed = Owner(), Owner()
    Ending(owner, lambda: ended.append(threading.current_thread().name))
    close = Ending(closed, lambda: ended.append("closed"))
    close()
    close()
    del owner, closed
    until(lambda: len(ended) == 2)
    assert ended == ["closed", "terrazzo-reaper"]


def test_one_end_that_fails_does_not_keep_the_next_one_from_coming(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    first, second = Owner(), Owner()
    Ending(first, lambda: 1 // 0)
    Ending(second, lambda: ended.append(1))
    del first, second
    until(lambda: ended == [1])
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_one_end_that_fails_at_exit_does_not_keep_the_others_from_coming() -> None:
    code = """
from terrazzo.processes.ending import Ending, start_thread
import threading
class Owner: ...
owners, asked = [Owner() for _ in range(4)], threading.Event()
def ask():
    asked.set()
    raise KeyError("asked")
start_thread("waits", asked.wait, ask)
starts = threading.Thread.start
def cannot(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = cannot
try:
    start_thread("never begins", print, lambda: None)
except RuntimeError as error:
    held = error  # and with it the thread
threading.Thread.start = starts
kept = [Ending(owner, work) for owner, work in zip(owners, [lambda: 1 // 0, lambda: print("ended")] * 2)]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n" * 2
    assert [done.stderr.count(error) for error in ("ZeroDivisionError:", "KeyError:")] == [2, 1]


@contextmanager
def locks_of_the_interpreter() -> Iterator[None]:
    """What a thread that starts or ends holds when it meets garbage."""
    kept = getattr(threading, "_shutdown_locks_lock", None)  # until Python 3.12
    with threading._active_limbo_lock:  # type: ignore[attr-defined]
        if kept is None:
            yield
        else:
            with kept:
                yield


@pytest.mark.cover(strength=1, tiers=by_state)
@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_a_model_that_is_garbage_while_the_interpreter_holds_its_locks(tiers: dict[str, str], tmp_path: Path) -> None:
    """The end of a store joined threads there, which takes the same locks: a wait for itself."""
    passed: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def collect() -> None:
        gc.freeze()  # what is alive already need not be looked at
        with fake_group(1):
            model, optimizer = built(tmp_path, tiers)
            step(model, optimizer)
            model.itself = [model]  # only the collector finds it
            with locks_of_the_interpreter():
                del model, optimizer
                gc.collect()
        passed.put(True)

    threading.Thread(target=collect, daemon=True).start()
    assert passed.get(timeout=60)
    until(lambda: not ours() and not list(tmp_path.iterdir()))


@contextmanager
def collecting_at_every_allocation() -> Iterator[None]:
    before = gc.get_threshold()
    gc.freeze()  # what is alive already need not be looked at each time
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.mark.cover(strength=1, tiers=by_state)
@pytest.mark.parametrize("tiers", [None, *TIERS.values()], ids=["device", *TIERS])
def test_garbage_is_collected_at_every_allocation(tiers: dict[str, str] | None, tmp_path: Path) -> None:
    """Models that only the collector finds, through start, steps, save and end of the next one."""
    swap, saved = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()

    def body(rank: int) -> None:
        with collecting_at_every_allocation():
            for number in range(2):
                model, optimizer = built(swap, tiers)
                for _ in range(2):
                    step(model, optimizer)
                checkpoint.save(saved / str(number), model, optimizer, {})
                model.itself = [model]
                del model, optimizer

    run_in_threads(1, body, timeout_s=120)
    gc.collect()
    until(lambda: not ours() and not list(swap.iterdir()))


# -- threads of models that are gone -----------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises in forward, in backward, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.when = nn.Linear(8, 8), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            raise ZeroDivisionError
        y: torch.Tensor = self.inner(x)
        if self.when == "backward":
            y.register_hook(lambda grad: 1 // 0)
        return y


@pytest.mark.cover(tiers=by_state)
@pytest.mark.parametrize("with_optimizer", [True, False], ids=["optimizer", "alone"])
@pytest.mark.parametrize("when", ["", "forward", "backward"])
@pytest.mark.parametrize("tiers", [None, *TIERS.values()], ids=["device", *TIERS])
def test_a_model_that_is_gone_lets_go_of_everything_without_the_collector(
    tiers: dict[str, str] | None, when: str, with_optimizer: bool, tmp_path: Path
) -> None:
    until(lambda: not ours())
    with fake_group(1):
        gc.disable()
        try:
            model = nn.Sequential(nn.Linear(8, 80), nn.Linear(80, 8), Fails())
            plan = tz.Plan.named("zero3").on(**(tiers or {}))
            offload = tz.Offload(path=tmp_path, block_mib=SMALL_BLOCK, depth=2, direct=False).used_under(plan)
            optimizer = adamw(model.parameters()) if with_optimizer else None
            model, optimizer = tz.shard(model, optimizer, plan, units=[nn.Linear, Fails], offload=offload)
            step(model, optimizer)
            model[2].when = when
            try:
                step(model, optimizer)
            except ZeroDivisionError:
                assert when
            gone = [weakref.ref(model), weakref.ref(model._terrazzo), weakref.ref(model._terrazzo.store)]
            del model, optimizer
            until(lambda: not ours() and not list(tmp_path.iterdir()))
            until(lambda: all(reference() is None for reference in gone))
        finally:
            gc.enable()


# -- the exit of the process -------------------------------------------------------------------------------------------

EXIT = """
import threading
from datetime import timedelta
import torch, torch.distributed as dist
import {package}
store, groups = dist.HashStore(), {{}}
def meet(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for _ in range(40):
    for group in groups.values():
        group.allreduce([torch.ones(1 << 18)])
"""


def test_exit_waits_until_gloo_has_let_go_of_tensors() -> None:
    """Without this package such a program is ended by SIGABRT now and then."""
    code = EXIT.format(package="terrazzo")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_thread_that_ends_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "3" / "comm").write_text("pt_gloo_runloop\n")
    (tmp_path / "3" / "status").write_text("Name:\tpt_gloo_runloop\nState:\tS (sleeping)\n")
    monkeypatch.setattr(ending, "_TASKS", tmp_path)
    assert ending._gloo_threads() == {"3": "State:\tS (sleeping)"}
    monkeypatch.setattr(ending, "_TASKS", tmp_path / "of another system")
    assert ending._gloo_threads() == {}


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [None, TIERS["cpu-all"], TIERS["all on nvme"]], ids=["device", "cpu", "nvme"])
def test_a_forked_child_that_uses_the_model_is_told_so(tiers: dict[str, str] | None, tmp_path: Path) -> None:
    with fake_group(2):
        model, optimizer = built(tmp_path, tiers)
        step(model, optimizer)

        def child() -> None:
            for use in (
                lambda: step(model, optimizer),
                lambda: engine_of(model).settle(),
                lambda: checkpoint.save(tmp_path / "saved", model, optimizer, {}),
                lambda: tz.gathered(model).__enter__(),
            ):
                with pytest.raises(tz.Misuse, match="belongs to the process that this one was forked from"):
                    use()

        assert reap(spawn_child(child)) == 0
        step(model, optimizer)


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_that_load_data_are_forks_that_do_not_mind(tmp_path: Path) -> None:
    with fake_group(1):
        model, optimizer = built(tmp_path, TIERS["all on nvme"])
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            assert len(batch) == 4
            step(model, optimizer)


def test_a_child_that_lives_on_does_not_keep_a_connection_of_its_rank() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    neighbour = Neighbour(1, 0, {"gather": ours})
    del ours
    child = spawn_child(lambda: time.sleep(60))
    try:
        del neighbour
        theirs.settimeout(20)
        assert theirs.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        reap(child)
        theirs.close()


def test_a_child_neither_keeps_nor_breaks_a_lock_of_its_parent(tmp_path: Path) -> None:
    ours, others = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert ours.take()
    assert reap(spawn_child(ours.release)) == 0
    assert others.take() is False
    child = spawn_child(lambda: time.sleep(60))
    try:
        assert ours._descriptor is not None
        os.close(ours._descriptor)  # as the end of this process would
        ours._descriptor = None
        until = time.monotonic() + 20
        while not others.take():  # the child lets go of it as soon as it runs
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        reap(child)
        others.release()


SAVES = """
import os, sys, time, torch, torch.distributed as dist, terrazzo as tz
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(400, 400)
model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), "zero3")
saver = tz.checkpoint.Saver(model, optimizer)
for number in range(3):
    saver.save(f"{sys.argv[1]}/{number}", {"step": number})
    child = os.fork()
    if not child:
        if number == 1:
            try:
                saver.save(f"{sys.argv[1]}/never", {})
            except tz.Misuse:
                pass
        sys.exit(number)
    until = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < until, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == number, ended
    saver.wait()
"""


@pytest.mark.long
def test_a_child_that_exits_leaves_the_background_save_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
