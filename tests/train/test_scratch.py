"""Folders that processes share in the temporary folder, and that none of them leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from terrazzo.errors import BadInput
from terrazzo.launch.rank import scratch_folder
from terrazzo.launch.rank.scratch_folder import ScratchFolder

PREFIX = f".terrazzo-scratch-{os.getuid()}-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_last_one_to_leave_removes_it(temporary: Path) -> None:
    first, second = ScratchFolder("a"), ScratchFolder("a")
    (first.path / "note").touch()
    first.leave()
    assert (second.path / "note").exists()
    second.leave()
    assert os.listdir(temporary) == []


def test_what_the_dead_leave_is_removed_and_what_is_in_use_stays(temporary: Path) -> None:
    dead = ScratchFolder("dead")
    dead.leave(keep=True)
    others = temporary / f".terrazzo-scratch-{os.getuid() + 1}-dead"
    shutil.copytree(dead.path, others)
    with ScratchFolder("a") as used, ScratchFolder("b"):
        assert used.exists()
        assert not dead.path.exists()
    assert os.listdir(temporary) == [others.name]


@pytest.mark.parametrize("name", [f"terrazzo-{os.getuid()}-steps", f"{PREFIX}mine"])
def test_a_folder_of_the_users_own_stays_whatever_its_name(temporary: Path, name: str) -> None:
    (temporary / name).mkdir(mode=0o700)
    (temporary / name / "thesis.txt").touch()
    with ScratchFolder("a"):
        pass
    assert [path.name for path in temporary.rglob("*")] == [name, "thesis.txt"]


def test_a_folder_that_vanishes_while_it_is_joined_leaves_nothing_open(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = scratch_folder._lock, 20

    def removed_meanwhile(descriptor: int, kind: int) -> bool:
        nonlocal left
        if (left := left - 1) > 0:
            os.rmdir(os.readlink(f"/proc/self/fd/{descriptor}"))
        return real(descriptor, kind)

    monkeypatch.setattr(scratch_folder, "_lock", removed_meanwhile)
    with ScratchFolder("a") as used:
        held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert [path for path in held if path.startswith(str(temporary))] == [str(used)]


def test_notes_stay_for_those_that_are_still_to_come(temporary: Path) -> None:
    first = ScratchFolder("a")
    first.leave(keep=True)
    with ScratchFolder("a") as same:
        assert same == first.path
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("how", ["link", "open to all", "file"])
def test_a_folder_that_others_may_write_to_is_refused(temporary: Path, how: str) -> None:
    path = temporary / f"{PREFIX}a"
    if how == "link":
        path.symlink_to(temporary)
    elif how == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    with pytest.raises(BadInput, match="TMPDIR"):
        ScratchFolder("a")
