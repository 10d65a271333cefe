"""What the system says of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.processes.system import (
    is_ending,
    is_stopped,
    is_traced,
    oom_kills,
    processor_s,
    state_of,
    waits_for_drive,
)


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


def test_processor_time_is_that_of_a_process_and_of_what_it_has_started() -> None:
    spin = "import sys, time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    inner = f"{spin}print(1, flush=True)\ninput()"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-Sc', {inner!r}])"
    with subprocess.Popen([sys.executable, "-Sc", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_s(child.pid) >= 0.28
        assert state_of(child.pid) in ("S", "R", "D")
        child.communicate(b"\n")
    assert processor_s(child.pid) == 0 and state_of(child.pid) == ""


def test_a_process_waits_for_a_drive_if_any_of_its_threads_does(tmp_path: Path) -> None:
    for thread, state in ((7, "S"), (9, "S")):
        (tmp_path / f"proc/7/task/{thread}").mkdir(parents=True)
        (tmp_path / f"proc/7/task/{thread}/stat").write_text(f"{thread} (a) b) {state} 1 2")
    assert not waits_for_drive(7, tmp_path / "sys")
    (tmp_path / "proc/7/task/9/stat").write_text("9 (a) b) D 1 2")
    assert waits_for_drive(7, tmp_path / "sys")


@pytest.mark.parametrize(("tracer", "held"), [("0", False), ("17", True)])
def test_a_process_is_traced_where_the_system_names_who(tmp_path: Path, tracer: str, held: bool) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/status").write_text(f"Name:\ta\nTracerPid:\t{tracer}\nUid:\t0\n")
    assert is_traced(7, tmp_path / "sys") is held
    assert not is_traced(8, tmp_path / "sys")


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
