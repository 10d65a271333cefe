"""What the system says of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from terrazzo.engine.process.system import is_ending


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


def test_nothing_is_known_of_processes_where_there_is_no_proc(tmp_path: Path) -> None:
    assert not is_ending(os.getpid(), tmp_path / "sys")
