"""Processes that end with their parent, whenever it dies: the file is used by its path, so that nothing is imported."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import time
import zipfile
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


SHOWS = """
from __future__ import annotations
import os, pickle, sys, threading
class Mine: pass
def go_on():
    threading.main_thread().join()
    print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, globals() is vars(sys.modules["__main__"]))
os.chdir("/")
print(__name__, __file__, os.path.exists(__file__), __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path[0])
threading.Thread(target=go_on).start()
"""


@pytest.mark.parametrize(
    "words",
    ["script.py a b", "-m script a -m", "-m package", "-m package.part", "folder a", "archive.zip a", "compiled.pyc"],
)
def test_modules_and_files_are_main_as_python_has_it(words: str, tmp_path: Path) -> None:
    """By relative paths, after a change of folder, and in a thread that goes on after the last line."""
    path = script(tmp_path, SHOWS)
    for name in ("package", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(SHOWS)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/part.py").write_text(SHOWS)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOWS)
    py_compile.compile(path, str(tmp_path / "compiled.pyc"))
    said = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True).stdout
        for command in ([sys.executable, *words.split()], tether.tethered(*words.split()))
    ]
    assert said[0] == said[1]
    assert said[0].endswith("True True\n")


def test_what_is_no_module_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for words, what in (("-m nothing", "No module named nothing"), ("folder", "No module named __main__")):
        command = tether.tethered(*words.split())
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"ImportError: {what}")
