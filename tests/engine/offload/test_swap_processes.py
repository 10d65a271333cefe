"""Swap files and the processes that made them: killed ones, forked ones, several at once."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from terrazzo.engine.offload.nvme.swap_file import sweep
from terrazzo.errors import Misuse
from tests.checkpoint.faults import reap, spawn_child
from tests.engine.offload.swap import disk_in, random_pages, read_back
from tests.helpers import programs

pytestmark = pytest.mark.alone


@contextmanager
def living(folder: Path) -> Iterator[tuple[int, Path]]:
    """A process that has a SwapSpace and waits until it is killed, here at the latest; its number and its file."""
    ready, tell = os.pipe()

    def work() -> None:
        disk = disk_in(folder)
        disk.write(0, random_pages(8)).wait()
        os.write(tell, bytes(disk.paths[0]))
        time.sleep(60)

    child = spawn_child(work)
    os.close(tell)
    with os.fdopen(ready, "rb", buffering=0) as said:
        path = Path(os.fsdecode(said.read(4096)))
    try:
        yield child, path
    finally:
        kill(child)


def kill(child: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):  # killed before
        os.kill(child, signal.SIGKILL)
        assert reap(child) == -signal.SIGKILL


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    with living(tmp_path) as (dead, stale), living(tmp_path) as (_, kept):
        kill(dead)
        assert stale.exists()
        disk = disk_in(tmp_path)
        assert {tmp_path / name for name in os.listdir(tmp_path)} == {kept, *disk.paths}
        disk.close()
    assert sweep([tmp_path]) == [str(kept)]
    assert not os.listdir(tmp_path)


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    disk = disk_in(tmp_path)
    data = random_pages(8)
    disk.write(0, data).wait()

    def child() -> None:
        assert not [
            name for name in os.listdir("/proc/self/fd") if str(tmp_path) in os.path.realpath(f"/proc/self/fd/{name}")
        ]
        with pytest.raises(Misuse, match="belongs to the process that this one was forked from"):
            disk.read(0, random_pages(8))
        disk.close()
        assert sweep([tmp_path]) == []
        own = disk_in(tmp_path)
        assert torch.equal(read_back(own, 0, 8), torch.zeros_like(data))
        atexit._run_exitfuncs()  # as in a child that ends by itself
        assert not own.paths[0].exists()

    assert reap(spawn_child(child)) == 0
    assert [tmp_path / name for name in os.listdir(tmp_path)] == disk.paths
    assert torch.equal(read_back(disk, 0, 8), data)
    disk.close()


def test_a_forked_child_that_lives_on_does_not_keep_the_file(tmp_path: Path) -> None:
    ready, tell = os.pipe()

    def parent() -> None:
        disk = disk_in(tmp_path)
        disk.write(0, random_pages(8)).wait()
        os.write(tell, b"%d" % spawn_child(lambda: time.sleep(60)))
        time.sleep(60)

    parent_id = spawn_child(parent)
    orphan = int(os.read(ready, 100))
    kill(parent_id)
    try:
        assert len(sweep([tmp_path])) == 1
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(ready)
        os.close(tell)


def test_starts_and_sweeps_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(60):
            disk = disk_in(tmp_path, pages=2)
            data = random_pages(2)
            disk.write(0, data).wait()
            assert disk.paths[0].exists()
            assert torch.equal(read_back(disk, 0, 2), data)
            disk.close()

    children = [spawn_child(work) for _ in range(4)]
    assert [reap(child) for child in children] == [0] * 4
    assert not os.listdir(tmp_path)


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.engine.offload.swap import disk_in, random_pages
disk = disk_in(Path({str(tmp_path)!r}), pages=4096)
disk.write(0, random_pages(4096))
print(disk.paths[0].exists(), flush=True)
raise KeyboardInterrupt
"""
    done = programs.run("-c", code, timeout_s=60)
    assert (done.stdout, done.returncode != 0) == ("True\n", True), done.stderr
    assert not os.listdir(tmp_path)
