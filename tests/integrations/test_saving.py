"""What integrations share of saving: a checkpoint is replaced by the next of its name, wherever that is interrupted."""

from __future__ import annotations

import importlib
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.integrations.shared import checkpoints
from tests.checkpoint import faults
from tests.helpers.threads import exclusive, run_in_threads

NONCE = "00c0ffee"


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    with exclusive():
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
    return tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")


def save(path: Path | str, step: int) -> None:
    run_in_threads(2, lambda rank: checkpoints.save_over(path, *built(), lambda: {"step": step}))


def step_of(path: Path) -> int:
    return checkpoint.open_source(path).step


def settled(path: Path) -> bool:
    found: list[bool] = run_in_threads(2, lambda rank: checkpoints.settle(path))
    assert len(set(found)) == 1
    return found[0]


def replaced_by(folder: Path) -> Any:
    """The old one under its name, the new one complete beside it; and how the one takes the other's place."""
    save(folder / "tag", 1)
    (folder / f".tag.saving-{NONCE}").touch()
    save(folder / f"tag.new-{NONCE}", 2)
    return lambda: checkpoints._take_place(str(folder / "tag"), NONCE)


def points(folder: Path) -> int:
    return len(faults.calls_of(folder, replaced_by(folder)))


@pytest.mark.parametrize(
    ("name", "files", "refused"),
    [("own", False, False), ("new", False, False), ("folder", False, True), ("folder", True, True)]
    + [(name, files, not files) for name in ("file", "dangling") for files in (False, True)],
)
def test_only_what_is_known_is_replaced(name: str, files: bool, refused: bool, tmp_path: Path) -> None:
    if name == "own":
        save(tmp_path / "own", 1)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("of another library")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    said = f"'{tmp_path / name}' is there and is not a checkpoint of Terrazzo's"

    def body(rank: int) -> None:
        checkpoints.save_over(f"{tmp_path / name}/", *built(), lambda: {"step": 2}, files=files)

    with pytest.raises(tz.BadInput, match=said) if refused else nullcontext():
        run_in_threads(2, body)
    assert refused or step_of(tmp_path / name) == 2
    assert (tmp_path / "folder").is_dir()


def test_a_kill_at_any_point_leaves_one_under_the_name(tmp_path: Path) -> None:
    count = points(tmp_path / "counted")
    assert count > 10
    found = []
    for point in sorted({-1, 0, *faults.sampled(range(count), 7)}):
        folder = tmp_path / str(point)
        work = replaced_by(folder)

        def killed(folder: Path = folder, work: Any = work, point: int = point) -> None:
            with faults.Tap(folder, faults.killed_after(point)):
                work()

        assert faults.in_child(killed) == -signal.SIGKILL
        assert settled(folder / "tag")
        found.append(step_of(folder / "tag"))
        assert not [name for name in faults.hidden(folder) if ".replaced-" in name]
        save(folder / "tag", 3)
        assert step_of(folder / "tag") == 3
        assert os.listdir(folder) == ["tag"], "the complete one that never got the name is gone too"
    assert found[0] == 1, "killed before anything was renamed"
    assert found == sorted(found)
    assert found[-1] == 2


def test_a_reader_may_settle_at_any_point_of_a_save(tmp_path: Path) -> None:
    for point in faults.sampled(range(points(tmp_path / "counted")), 8):
        folder = tmp_path / str(point)
        work = replaced_by(folder)

        def fault(call: faults.Call, real: faults.Real, folder: Path = folder, point: int = point) -> Any:
            if call.number == point:
                checkpoints._settle(str(folder / "tag"))
            return real()

        with faults.Tap(folder, fault):
            work()
        assert step_of(folder / "tag") == 2
        assert not faults.hidden(folder)


def test_a_reader_needs_neither_list_nor_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path / "tag", 1)
    (tmp_path / f".tag.replaced-{NONCE}").touch()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "remove", refused)
        assert settled(tmp_path / "tag")
        patch.setattr(checkpoints.os, "listdir", refused)
        assert settled(tmp_path / "tag")
    (tmp_path / "tag").rename(tmp_path / f"tag.new-{NONCE}")
    monkeypatch.setattr(checkpoints.os, "rename", refused)
    with pytest.raises(tz.BadInput, match="rank 0: PermissionError"):
        settled(tmp_path / "tag")


def test_a_slash_at_the_end_is_no_part_of_the_name(tmp_path: Path) -> None:
    for step in (1, 2):
        save(f"{tmp_path}/tag/", step)
        assert step_of(tmp_path / "tag") == step
    assert [each.name for each in tmp_path.iterdir()] == ["tag"]


def test_rank_0_says_what_a_trainers_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may see a rename late."""
    trainer = pytest.importorskip("terrazzo.integrations.transformers.trainer")
    save(tmp_path / "terrazzo", 1)
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: dist.get_rank() == 0 and real(path))
    found = run_in_threads(2, lambda rank: trainer.state_of(str(tmp_path)))
    assert found == [str(tmp_path / "terrazzo")] * 2


def test_a_trainers_checkpoint_that_one_rank_cannot_open(tmp_path: Path) -> None:
    trainer = pytest.importorskip("terrazzo.integrations.transformers.trainer")
    save(tmp_path / "tag", 1)

    def body(rank: int) -> str:
        with pytest.raises(tz.BadInput) as told:
            trainer.opened(str(tmp_path / ("tag" if rank == 0 else "unseen")))
        return str(told.value)

    assert run_in_threads(2, body) == [f"There is no checkpoint '{tmp_path}/unseen'."] * 2


def test_rank_0_says_whose_checkpoint_lightning_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("terrazzo.integrations.lightning.trainer.checkpoint")
    folder = importlib.import_module("terrazzo.integrations.lightning.checkpoint_folder")
    real = folder.own_folder
    monkeypatch.setattr(folder, "own_folder", lambda path: real(path) if dist.get_rank() == 0 else None)

    def body(rank: int) -> int:
        model, optimizer = built()
        lightning.save_checkpoint(str(tmp_path / "tag"), model, optimizer, {"global_step": 3})
        step: int = lightning.load_checkpoint(str(tmp_path / "tag"), model, optimizer)["global_step"]
        return step

    assert run_in_threads(2, body) == [3, 3]


def test_nothing_but_its_own_is_removed(tmp_path: Path) -> None:
    """Names much like those that are made meanwhile, and what had the name of one that was removed since."""
    save(tmp_path / "tag", 1)
    for stranger in (
        "tag.new",
        f"tag.new-{NONCE}",
        ".tag.saving",
        ".tag.replaced",
        ".another tag.replaced-00c0ffee",
        "tag.replaced",
    ):
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

    monkeypatch.setattr(checkpoints, "_take_place", fails)
    with pytest.raises(tz.SaveFailed, match="rank 0: PermissionError"):
        save(tmp_path / "tag", 2)
    assert step_of(tmp_path / "tag") == 1
