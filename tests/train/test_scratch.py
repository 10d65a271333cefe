"""Folders that processes share in the temporary folder, and that none of them leaves behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from terrazzo.errors import BadInput
from terrazzo.train.scratch import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_last_one_to_leave_removes_it(temporary: Path) -> None:
    first, second = Scratch("a"), Scratch("a")
    (first.path / "note").touch()
    first.leave()
    assert (second.path / "note").exists()
    second.leave()
    assert os.listdir(temporary) == []


def test_what_the_dead_leave_is_removed_and_what_is_in_use_stays(temporary: Path) -> None:
    (temporary / f"terrazzo-{os.getuid()}-dead").mkdir(mode=0o700)
    others = temporary / f"terrazzo-{os.getuid() + 1}-dead"
    others.mkdir(mode=0o700)
    with Scratch("a") as used, Scratch("b"):
        assert used.exists()
    assert os.listdir(temporary) == [others.name]


def test_notes_stay_for_those_that_are_still_to_come(temporary: Path) -> None:
    first = Scratch("a")
    first.leave(keep=True)
    with Scratch("a") as same:
        assert same == first.path
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("how", ["link", "open to all", "file"])
def test_a_folder_that_others_may_write_to_is_refused(temporary: Path, how: str) -> None:
    path = temporary / f"terrazzo-{os.getuid()}-a"
    if how == "link":
        path.symlink_to(temporary)
    elif how == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    with pytest.raises(BadInput, match="TMPDIR"):
        Scratch("a")
