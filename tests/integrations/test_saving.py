"""What the doors share of saving: a checkpoint is replaced by the next of its name, wherever that is interrupted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.integrations import saving
from tests.checkpoint import faults
from tests.helpers.threads import exclusive, run_in_threads

NONCE = "00c0ffee"


def save(path: Path, step: int) -> None:
    def body(rank: int) -> None:
        with exclusive():
            torch.manual_seed(0)
            model = nn.Linear(5, 3)
        model, optimizer = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
        saving.save_over(path, model, optimizer, {"step": step})

    run_in_threads(2, body)


def step_of(path: Path) -> int:
    return checkpoint.open_source(path).step


def settled(path: Path) -> bool:
    found: list[bool] = run_in_threads(2, lambda rank: saving.settle(path))
    assert len(set(found)) == 1
    return found[0]


def replaced_by(folder: Path) -> Any:
    """The old one under its name, the new one complete beside it; and how the one takes the other's place."""
    save(folder / "tag", 1)
    save(folder / f"tag.new-{NONCE}", 2)
    return lambda: saving._take_place(str(folder / "tag"), NONCE)


def points(folder: Path) -> int:
    return len(faults.calls_of(folder, replaced_by(folder)))


def test_a_kill_at_any_point_leaves_one_under_the_name(tmp_path: Path) -> None:
    count = points(tmp_path / "counted")
    assert count > 10
    found = []
    for point in range(-1, count):
        folder = tmp_path / str(point)
        work = replaced_by(folder)

        def killed(folder: Path = folder, work: Any = work, point: int = point) -> None:
            with faults.Tap(folder, faults.killed_after(point)):
                work()

        assert faults.in_child(killed) == -signal.SIGKILL
        assert settled(folder / "tag")
        found.append(step_of(folder / "tag"))
        assert not faults.hidden(folder)
        save(folder / "tag", 3)
        assert step_of(folder / "tag") == 3
    assert found[0] == 1, "killed before anything was renamed"
    assert found == sorted(found)
    assert found[-1] == 2


def test_nothing_but_its_own_is_removed(tmp_path: Path) -> None:
    """Names much like those that are made meanwhile, and what had the name of one that was removed since."""
    save(tmp_path / "tag", 1)
    for stranger in ("tag.new", f"tag.new-{NONCE}", ".tag.replaced", ".another tag.replaced-00c0ffee", "tag.replaced"):
        (tmp_path / stranger).mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    save(tmp_path / "tag", 2)
    assert step_of(tmp_path / "tag") == 2
    assert {path.name for path in tmp_path.iterdir()} == before
    (tmp_path / "tag").rename(tmp_path / "mine")
    (tmp_path / ".tag.replaced-00000000").mkdir()
    assert not settled(tmp_path / "tag"), "nothing comes back"


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "tag", 1)

    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saving, "_take_place", fails)
    with pytest.raises(tz.SaveFailed, match="rank 0: PermissionError"):
        save(tmp_path / "tag", 2)
    assert step_of(tmp_path / "tag") == 1
