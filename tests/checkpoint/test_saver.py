"""Saving in the background, on real processes: what is saved, when, and what a failure does."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.storage import local
from terrazzo.errors import BadInput, RanksApart, SaveFailed
from tests.engine.toys import Net, adamw, batch, loss_of
from tests.helpers import programs
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.helpers.programs import Program

pytestmark = pytest.mark.processes


def built(plan: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net()
    return tz.shard(model, adamw(model.parameters()), plan, units=["blocks.*"])


def step(model: nn.Module, optimizer: Any, index: int) -> None:
    loss_of(model, batch(index)).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(folder: str) -> dict[tuple[str, str], torch.Tensor]:
    source = checkpoint.open_source(folder)
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


def save_both_ways(folder: str, plan: str) -> None:
    """The same moments saved in the background, and at once: parameters change while the copies are written."""
    model, optimizer = built(plan)
    with checkpoint.Saver(model, optimizer, run="r") as saver:
        for index in range(4):  # before the first step there are no moments, so that the copy grows
            checkpoint.save(f"{folder}/at-once-{index}", model, optimizer, {"step": index}, run="r")
            saver.save(f"{folder}/background-{index}", {"step": index})
            step(model, optimizer, index)
        with pytest.raises(BadInput, match="exists already"):
            saver.save(f"{folder}/at-once-0", {})


@pytest.fixture(scope="module")
def pool() -> Any:
    with Pool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("plan", mostly_long(["zero0", "zero3"], "zero3"))
def test_a_background_save_is_of_its_moment_whatever_happens_after(pool: Pool, tmp_path: Path, plan: str) -> None:
    pool.run(save_both_ways, str(tmp_path), plan)
    for index in range(4):
        expected, found = state(f"{tmp_path}/at-once-{index}"), state(f"{tmp_path}/background-{index}")
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def fail_on_the_second_rank(folder: str, store_fails: bool) -> list[str]:
    model, optimizer = built("zero3")
    rank = torch.distributed.get_rank()
    saver = checkpoint.Saver(model, optimizer)
    saver.save(f"{folder}/step-00000001", {"step": 1})
    saver.wait()
    writer = saver._writer._process.pid
    if rank == 1:
        os.kill(writer, signal.SIGSTOP)  # there when the save begins, and at nothing
    said = []
    saver.save(f"{folder}/step-00000002", {"step": 2})
    if rank == 1:
        os.kill(writer, signal.SIGKILL)
        if store_fails:
            saver._under_way[1].committed = unanswered  # type: ignore[index, method-assign]
    for act in (lambda: saver.save(f"{folder}/step-00000003", {"step": 3}), saver.close):
        try:
            act()
        except SaveFailed as error:
            said.append(str(error))
    return said


def unanswered() -> bool:
    raise RuntimeError("the store does not answer")


@pytest.mark.parametrize("store_fails", mostly_long([False, True], True))
def test_a_killed_writer_is_an_error_on_every_rank_and_earlier_ones_are_intact(
    pool: Pool, tmp_path: Path, store_fails: bool
) -> None:
    said = pool.run(fail_on_the_second_rank, str(tmp_path), store_fails)
    assert said[0] == said[1]
    assert "step-00000002' was not saved" in said[0][0]
    assert "killed by signal 9" in said[0][0]
    assert checkpoint.complete_checkpoints(tmp_path) == [f"{tmp_path}/step-00000001"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def exceed(folder: str) -> None:
    model, optimizer = built("zero3")
    refused: dict[str, list[Any]] = {"patience_s": [-1, "5", math.nan], "staging_limit_bytes": ["1 GB"]}
    for name, values in refused.items():
        for value in values:
            options: dict[str, Any] = {name: value}
            with pytest.raises(BadInput, match=f"{name} is {value!r}: give a number of"):
                checkpoint.Saver(model, optimizer, **options)
    apart = checkpoint.Saver(model, optimizer, patience_s=10.0 + dist.get_rank())
    with pytest.raises(RanksApart, match="patience_s is 10 on rank 0 and 11 on rank 1"):
        apart.save(f"{folder}/a", {})
    apart.close()
    with checkpoint.Saver(model, optimizer, staging_limit_bytes=1000) as saver:
        with pytest.raises(BadInput, match="the limit is 1,000"):
            saver.save(f"{folder}/a", {})
        assert os.listdir(folder) == []


def test_a_copy_beyond_the_limit_is_refused_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(exceed, str(tmp_path))


def fail_to_begin(folder: str) -> str:
    def full(draft: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, optimizer = built("zero3")
    begin, local.LocalDraft.begin = local.LocalDraft.begin, full  # type: ignore[method-assign,assignment]
    try:
        with checkpoint.Saver(model, optimizer) as saver:
            saver.save(f"{folder}/a", {})
    except SaveFailed as error:
        return str(error)
    finally:
        local.LocalDraft.begin = begin  # type: ignore[method-assign]
    return ""


def test_a_full_disk_is_said_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(fail_to_begin, str(tmp_path))
    assert said[0] == said[1]
    assert "No space left" in said[0]


PROGRAM = """
import sys, torch, terrazzo as tz, torch.distributed as dist
from terrazzo import checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(1000, 1000)
model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), "zero3")
saver = checkpoint.Saver(model, optimizer)
print(saver._writer._process.pid, flush=True)
saver.save(sys.argv[1] + "/step-00000001", {"step": 1})
if sys.argv[2] == "ends":
    sys.exit(0)
import time; time.sleep(60)
"""


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    done = programs.run("-c", PROGRAM, str(tmp_path), "ends")
    assert done.returncode == 0, done.stderr
    assert checkpoint.latest(tmp_path) == f"{tmp_path}/step-00000001"


def test_a_program_ends_though_its_writer_cannot_be_killed(tmp_path: Path) -> None:
    """As one in a system call that no signal interrupts."""
    held = """
import os, signal
from terrazzo.checkpoint.saving import background, writer_process
background.BRIEF_S = writer_process.BRIEF_S = 0.2
saver.save(sys.argv[1] + "/step-00000000", {"step": 0})
saver.wait()  # by now the writer is tied to this process
os.kill(saver._writer.pid, signal.SIGSTOP)
saver._writer._process.kill, saver._patience_s = lambda: None, 0.5
"""
    begun, ended = PROGRAM.split("saver.save")
    done = programs.run("-c", f"{begun}{held}saver.save{ended}", str(tmp_path), "ends", timeout_s=50)
    assert "made no progress" in done.stderr
    assert checkpoint.complete_checkpoints(tmp_path) == [f"{tmp_path}/step-00000000"]


def test_a_writer_does_not_outlive_its_program(tmp_path: Path) -> None:
    program = Program("-c", PROGRAM, str(tmp_path), "stays")
    writer = int(program.stdout.readline())
    program.send_signal(signal.SIGKILL)
    program.communicate()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{writer}/cmdline") and Path(f"/proc/{writer}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def save_often(folder: str) -> list[tuple[int, int]]:
    """Open files and threads after each of twelve saves."""
    model, optimizer = built("zero3")
    counts = []
    with checkpoint.Saver(model, optimizer) as saver:
        for index in range(12):
            saver.save(f"{folder}/step-{index:08d}", {"step": index})
            saver.wait()
            torch.distributed.barrier()
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_many_saves_leave_no_files_open_and_no_threads(pool: Pool, tmp_path: Path) -> None:
    for counts in pool.run(save_often, str(tmp_path)):
        for early, late in zip(zip(*counts[3:7], strict=True), zip(*counts[-4:], strict=True), strict=True):
            assert min(late) <= max(early)  # whatever is just ending, some of the last have nothing more


def close_twice(folder: str) -> None:
    model, optimizer = built("zero3")
    with checkpoint.Saver(model, optimizer) as saver:
        saver.save(f"{folder}/a", {})
        saver.close()
    with pytest.raises(tz.Misuse, match="has been closed"):
        saver.save(f"{folder}/b", {})


def test_a_saver_closes_once_and_saves_no_more(pool: Pool, tmp_path: Path) -> None:
    pool.run(close_twice, str(tmp_path))
    assert os.listdir(tmp_path) == ["a"]


def save_weights_alone(folder: str) -> None:
    model, optimizer = built("zero1")
    step(model, optimizer, 0)
    checkpoint.save(f"{folder}/a", model, None, {})


def test_without_an_optimizer_the_weights_alone_are_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_weights_alone, str(tmp_path))
    assert {kind for _, kind in state(f"{tmp_path}/a")} == {"weight"}


def test_a_writer_starts_without_torch() -> None:
    """It would take a second of each rank's core at every start of a run, and 200 MB of its host while it lasts."""
    code = "import sys, terrazzo.checkpoint.saving.writer_main\nprint({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
