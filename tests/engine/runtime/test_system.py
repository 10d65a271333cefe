"""What the system says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.engine.runtime.system import is_ending, is_stopped, oom_kills


def test_a_process_is_ending_from_its_exit_on_and_not_before() -> None:
    assert not is_ending(os.getpid())
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_ending(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        deadline = time.monotonic() + 30
        while not is_ending(child.pid):  # and stays so, for nobody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not is_ending(child.pid)


def test_a_process_is_stopped_from_the_signal_on_until_it_goes_on() -> None:
    assert not is_stopped(os.getpid())
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as child:
        for number, stops in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            child.send_signal(number)
            deadline = time.monotonic() + 30
            while is_stopped(child.pid) is not stops:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        child.kill()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"sys/fs/cgroup/jobs/7/memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"}, 3),
        ({"sys/fs/cgroup/jobs/memory.events": "oom 4\noom_kill 2\n", "proc/vmstat": "oom_kill 9\n"}, 2),
        ({"sys/fs/cgroup/memory/old/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
        ({"proc/vmstat": "nr_free_pages 7\noom_kill 9\n"}, 9),
        ({}, None),
    ],
    ids=["own group", "group above", "version 1", "machine", "nothing"],
)
def test_processes_ended_for_want_of_memory_are_those_of_the_control_group(
    tmp_path: Path, files: dict[str, str], found: int | None
) -> None:
    for name, text in ({"proc/self/cgroup": "4:memory:/old\n0::/jobs/7\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path / "sys") == found


def test_nothing_is_known_of_processes_where_there_is_no_proc(tmp_path: Path) -> None:
    assert not is_ending(os.getpid(), tmp_path / "sys")
    assert not is_stopped(os.getpid(), tmp_path / "sys")
