"""Processes that end with their parent, whenever it dies: the file is used by its path, so that nothing is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.processes import tether

CHILD = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(" ".join(sys.argv[1:]))
time.sleep(60)
"""

PARENT = f"""
import subprocess, sys, time
sys.path.insert(0, {os.path.dirname(tether.__file__)!r})
import tether
print(subprocess.Popen(tether.tethered(*sys.argv[1:])).pid, flush=True)
time.sleep(60)
"""

WITHOUT_KERNEL = f"""
import sys
sys.path.insert(0, {os.path.dirname(tether.__file__)!r})
import tether, time
tether._kernel_kills = lambda: False
tether.tie(int(sys.argv[2]))
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("-m terrazzo run", ""),
        ("/bin/terrazzo run -u", ""),
        ("-c pass -u", ""),
        ("-u -X dev -m terrazzo run -u script.py", "-u -X dev"),
        ("-Wignore -Xutf8=1 -um terrazzo", "-W ignore -X utf8=1 -u"),
        ("-OuX dev -i -m terrazzo", "-Ou -X dev"),
        ("--check-hash-based-pycs never -B script.py -B", "--check-hash-based-pycs never -B"),
        ("-I - -B", "-I"),
    ],
)
def test_options_of_the_interpreter_are_told_from_those_of_what_it_runs(
    words: str, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    assert " ".join(tether.interpreter_flags()) == flags


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def assert_ends(pid: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("begun", [False, True])
def test_a_child_ends_with_its_killed_parent(tmp_path: Path, begun: bool) -> None:
    command = [sys.executable, "-c", PARENT, script(tmp_path, CHILD), str(tmp_path / "begun")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if begun:
            await_file(tmp_path / "begun")
        parent.kill()
    assert_ends(child, 10)


def test_a_child_whose_parent_is_gone_already_does_nothing(tmp_path: Path) -> None:
    command = tether.tethered(script(tmp_path, CHILD), str(tmp_path / "begun"))
    command[-3] = "1" if os.getpid() != 1 else "2"
    assert subprocess.run(command, timeout=30).returncode == 1
    assert not (tmp_path / "begun").exists()


def test_a_child_watches_its_parent_where_the_kernel_does_not(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time;"
        "print(subprocess.Popen([sys.executable, *sys.argv[1:], str(os.getpid())]).pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, script(tmp_path, WITHOUT_KERNEL), str(tmp_path / "begun")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        await_file(tmp_path / "begun")
        parent.kill()
    assert_ends(child, 10)


def test_modules_and_files_see_the_arguments_and_paths_that_python_gives_them(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys; print(__name__, sys.argv[1:], sys.path[0])")
    for arguments in (["-m", "script", "a", "b"], [path, "a", "b"]):
        said = [
            subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True).stdout
            for command in ([sys.executable, *arguments], tether.tethered(*arguments))
        ]
        assert said[0] == said[1] != ""
