"""The checkpoints of runs in one place, local and behind a URL: which is newest, which are kept, who may write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.operations.convert import convert
from terrazzo.checkpoint.operations.describe import expand, lost
from terrazzo.checkpoint.rng import capture_rng, restore_rng
from terrazzo.checkpoint.saving.job import FAILED, record_name
from terrazzo.checkpoint.series import retention
from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.checkpoint.storage.remote import RemoteStore
from terrazzo.errors import BadInput, Damaged, SaveFailed
from tests.helpers.programs import Program
from tests.helpers.threads import exclusive, run_in_threads


def built() -> tuple[nn.Module, Any]:
    with exclusive():
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
    return tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "zero3")


def save_steps(
    folder: str | Path, *steps: int, run: str = "r", metrics: dict[int, float] | None = None, evaluation: str = "a"
) -> None:
    """Checkpoints whose weights are all their step's number."""

    def body(rank: int) -> None:
        model, optimizer = built()
        for step in steps:
            with tz.gathered(model, write=True) as parameters, torch.no_grad():
                for value in parameters.values():
                    value.fill_(step)
            extra = {"step": step, "metric": (metrics or {}).get(step), "evaluation": evaluation}
            checkpoint.save(checkpoint.step_path(folder, step), model, optimizer, extra, run=run)

    run_in_threads(2, body)


def names(folder: str | Path) -> list[str]:
    return [path.rpartition("/")[2] for path in checkpoint.complete_checkpoints(folder)]


def resumed(folder: str | Path) -> tuple[float, checkpoint.Resumed]:
    """What the weights are after resuming, on the first rank."""

    def body(rank: int) -> tuple[float, checkpoint.Resumed]:
        model, optimizer = built()
        found = checkpoint.load_newest(folder, model, optimizer)
        assert found is not None
        with tz.gathered(model) as parameters:
            return float(parameters["bias"][0].detach()), found

    return run_in_threads(2, body)[0]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A folder, and a URL."""
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
        return
    yield "memory://terrazzo-test/checkpoints"
    memory = fsspec.filesystem("memory")
    memory.rm("/terrazzo-test", recursive=True)


def test_the_newest_is_the_highest_step_and_resumes_to_the_bit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.latest(folder) is None
    save_steps(folder, 9, 100_000_000, 20)
    assert names(folder) == ["step-00000009", "step-00000020", "step-100000000"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "step_path", lambda folder, step: f"{folder}/step-{step:09d}")
        save_steps(folder, 20)  # under a name that no series gives, and that hides none that it does
    assert names(folder) == ["step-00000009", "step-00000020", "step-100000000"]
    weight, found = resumed(folder)
    assert weight == 100_000_000
    assert (found.path, found.run, found.world_size, found.refused) == (checkpoint.latest(folder), "r", 2, {})
    assert found.extra["step"] == 100_000_000


def test_a_folder_of_checkpoints_that_are_no_steps_is_refused(folder: str) -> None:
    """A run that resumes there would begin at step 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "step_path", lambda folder, step: f"{folder}/{('step-100', 'last')[step]}")
        save_steps(folder, 0, 1)

    def newest(rank: int) -> None:
        checkpoint.load_newest(folder, *built())

    refused = (
        lambda: checkpoint.latest(folder),
        lambda: checkpoint.prune(folder, keep_last=1),
        lambda: checkpoint.clear(folder),
        lambda: run_in_threads(2, newest),
    )
    for call in refused:
        with pytest.raises(BadInput, match=r"none is named as the steps.*: last, step-100\. .*step-00000100"):
            call()
    with pytest.raises(BadInput, match=r"last' is a checkpoint itself.*tz\.checkpoint\.load"):
        checkpoint.latest(f"{folder}/last")
    save_steps(folder, 3)
    assert names(folder) == ["step-00000003"]  # beside which others may lie
    checkpoint.set_aside(f"{folder}/step-00000003")
    for name in ("last", "step-100"):
        fsspec.url_to_fs(folder)[0].rm(f"{folder}/{name}", recursive=True)
    assert names(folder) == []  # damaged or suspect ones are known


@pytest.mark.parametrize("step", [-1, 5.0, "5", True, None])
def test_what_is_no_number_of_steps_has_no_path(step: Any) -> None:
    with pytest.raises(BadInput, match=f"step is {step!r}: give the number"):
        checkpoint.step_path("a", step)


def test_the_step_of_a_path_with_a_slash_at_its_end(tmp_path: Path) -> None:
    assert checkpoint.step_of("a/step-00000100/") == 100 == checkpoint.step_of(tmp_path / "step-00000100")
    assert checkpoint.step_of("a/step-100/") is None


def test_what_another_rank_has_removed_or_renamed_is_no_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where every rank calls what is for one: each has seen the folder before the others change it."""
    save_steps(folder, 1, 2)
    stale = names(folder)
    checkpoint.prune(folder, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(retention, "complete_names", lambda store: stale)
        checkpoint.clear(folder)
        checkpoint.clear(folder)
        assert checkpoint.suspect(folder, after=0) == []
    with pytest.raises(BadInput, match=r"no checkpoint '.*step-00000001'"):
        checkpoint.set_aside(f"{folder}/step-00000001")


def test_what_a_conversion_loses_is_what_was_there(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    source = checkpoint.open_source(tmp_path / "step-00000001")
    generators = "the states of the ranks' random generators"
    assert all(generators in lost(source, to) for to in ("terrazzo", "hf", "dcp"))
    convert(source, str(tmp_path / "converted"))
    converted = checkpoint.open_source(tmp_path / "converted")
    assert not any(generators in lost(converted, to) for to in ("terrazzo", "hf", "dcp"))


def test_an_existing_name_is_refused_and_left_as_it_is(folder: str) -> None:
    save_steps(folder, 1)
    with pytest.raises(BadInput, match="exists already"):
        save_steps(folder, 1)
    assert resumed(folder)[0] == 1


@pytest.mark.parametrize("strangers", [["step-00000001/rank-00000.safetensors"], ["part-0.parquet", "failed.note"]])
def test_what_no_save_left_behind_is_never_removed(folder: str, strangers: list[str]) -> None:
    """The name of a folder of checkpoints, or of data, is taken: the objects under it stay."""
    fs, _ = fsspec.url_to_fs(folder)
    for each in strangers:
        fs.makedirs(f"{folder}/name/{each}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{folder}/name/{each}", b"dear")

    def body(rank: int) -> None:
        checkpoint.save(f"{folder}/name", *built(), {})

    with pytest.raises(BadInput, match=r"name'.*exists already|name'.*not of a save"):
        run_in_threads(2, body)
    assert [fs.cat_file(f"{folder}/name/{each}") for each in strangers] == [b"dear"] * len(strangers)


def test_what_an_interrupted_save_left_behind_a_url_makes_room() -> None:
    memory = fsspec.filesystem("memory")
    for each in ("rank-00000.safetensors", "rank-00001.note", "manifest.sha256"):
        memory.pipe_file(f"/terrazzo-test/step-00000007/{each}", b"half")
    try:
        save_steps("memory://terrazzo-test", 7)
        assert resumed("memory://terrazzo-test")[0] == 7
    finally:
        memory.rm("/terrazzo-test", recursive=True)


def flip_a_byte(folder: str | Path, step: int) -> None:
    """The last one of the last rank's tensors: the manifest and all sizes stay as they were."""
    fs, _ = fsspec.url_to_fs(str(folder))
    path = f"{checkpoint.step_path(folder, step)}/rank-00001.safetensors"
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))


def test_a_damaged_newest_is_passed_over_with_its_reason(folder: str) -> None:
    save_steps(folder, 1, 2, 3)
    fs, _ = fsspec.url_to_fs(folder)
    fs.pipe_file(f"{folder}/step-00000003/manifest.json", b"{}")
    flip_a_byte(folder, 2)
    weight, found = resumed(folder)
    assert weight == 1
    assert [path.rpartition("/")[2] for path in found.refused] == ["step-00000003", "step-00000002"]
    assert "manifest.json" in found.refused[f"{folder}/step-00000003"]
    assert "rank-00001.safetensors" in found.refused[f"{folder}/step-00000002"]
    for path, why in found.refused.items():
        assert (moved := re.search(rf" It is '({path.rpartition('/')[2]}\.damaged-[0-9a-f]+)' now\.$", why)), why
        assert fs.exists(f"{folder}/{moved[1]}/rank-00001.safetensors")
    assert names(folder) == ["step-00000001"]
    save_steps(folder, 2)  # the run comes to that step again
    for step in (1, 2):
        fs.pipe_file(f"{folder}/step-0000000{step}/manifest.sha256", b"")
    with pytest.raises(Damaged, match=r"No checkpoint is whole.*step-00000002.*step-00000001"):
        resumed(folder)
    assert names(folder) == ["step-00000001", "step-00000002"]
    assert ".damaged-" in checkpoint.set_aside(f"{folder}/step-00000002")


def test_retention_after_falling_back_does_not_count_what_was_refused(folder: str) -> None:
    """Bytes of tensors are damaged, which nothing but reading them all shows."""
    save_steps(folder, 10, 20, 30)
    flip_a_byte(folder, 20)
    flip_a_byte(folder, 30)
    assert resumed(folder)[0] == 10
    save_steps(folder, 15)
    assert checkpoint.prune(folder, keep_last=2) == []
    assert names(folder) == ["step-00000010", "step-00000015"]
    save_steps(folder, 20)
    assert checkpoint.prune(folder, keep_last=2) == ["step-00000010"]
    assert resumed(folder)[0] == 20


def test_what_is_refused_and_cannot_be_renamed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    flip_a_byte(tmp_path, 2)

    def read_only(self: LocalStore, name: str) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(LocalStore, "set_aside", read_only)
    weight, found = resumed(tmp_path)
    assert weight == 1
    [why] = found.refused.values()
    assert "left under its name ([Errno 30] Read-only file system): rename it" in why


def test_retention_keeps_last_every_and_best_of_its_own_run(folder: str) -> None:
    save_steps(folder, 1, 2, 3, 4, 5, 6, metrics={1: 0.5, 2: 0.9, 3: 0.4, 4: 0.8})
    save_steps(folder, 7, run="another")
    gone = checkpoint.prune(folder, keep_last=1, keep_every=4, keep_best=1, run="r")
    assert gone == ["step-00000001", "step-00000002", "step-00000005"]
    assert names(folder) == ["step-00000003", "step-00000004", "step-00000006", "step-00000007"]
    checkpoint.clear(folder)
    assert names(folder) == []


def test_retention_keeps_the_newest_that_is_sure_also_at_step_0(tmp_path: Path) -> None:
    save_steps(tmp_path, 0, 1, 2)
    assert checkpoint.prune(tmp_path, keep_last=1, sure=0, dry_run=True) == ["step-00000001"]
    assert checkpoint.prune(tmp_path, keep_last=1, sure=1, dry_run=True) == ["step-00000000"]
    assert checkpoint.prune(tmp_path, keep_last=1) == ["step-00000000", "step-00000001"]


def test_the_best_are_those_of_the_newest_evaluation(tmp_path: Path) -> None:
    """Losses on other data say nothing about these."""
    save_steps(tmp_path, 1, 2, metrics={1: 0.5, 2: 0.4})
    save_steps(tmp_path, 3, evaluation="b")
    assert checkpoint.prune(tmp_path, keep_last=1, keep_best=1, dry_run=True) == ["step-00000001"]
    save_steps(tmp_path, 4, 5, 6, metrics={4: 0.8, 5: 0.9}, evaluation="b")
    gone = checkpoint.prune(tmp_path, keep_last=1, keep_best=1)
    assert gone == [f"step-0000000{step}" for step in (1, 2, 3, 5)]


@pytest.mark.parametrize(
    ("option", "value"), [("keep_last", 0), ("keep_best", -1), ("keep_every", 0), ("keep_every", -2)]
)
def test_retention_refuses_numbers_that_are_too_small(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(BadInput, match=f"{option} is {value}: "):
        checkpoint.prune(tmp_path, **{"keep_last": 1, option: value})


def test_behind_a_url_an_attempt_does_not_hear_the_one_before_it() -> None:
    """One that hung writes its notes after the next has begun: another rank's part, or that there was a failure."""
    store = RemoteStore("memory://terrazzo-test/attempts")
    old, new = store.draft("a", "0000aaaa"), store.draft("a", "0000bbbb")
    old.begin()
    new.begin()
    try:
        for file in (record_name(1), FAILED):
            old.note(file, b"old")
            assert not new.has_note(file)
            with pytest.raises(FileNotFoundError):
                new.noted(file)
            new.note(file, b"new")
            assert (new.has_note(file), new.noted(file), old.noted(file)) == (True, b"new", b"old")
        assert not new.committed()
        new.commit(b"{}", b"")
        assert new.committed()
        left = fsspec.filesystem("memory").ls("/terrazzo-test/attempts/a", detail=False)
        assert sorted(path.rpartition("/")[2] for path in left) == ["manifest.json", "manifest.sha256"]
    finally:
        fsspec.filesystem("memory").rm("/terrazzo-test", recursive=True)


@pytest.mark.parametrize("name", ["ls", "open", "pipe_file"])
def test_a_store_that_fails_in_its_own_way_fails_the_save_and_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Libraries of object stores have errors that are no `OSError`."""
    memory = type(fsspec.filesystem("memory"))

    def refuses(self: Any, path: str, *rest: Any, **named: Any) -> Any:
        raise LookupError("403, quota exceeded.")

    monkeypatch.setattr(memory, name, refuses)
    said = r"'memory://terrazzo-quota/step-00000001' was not saved: rank 0: .*LookupError: 403, quota exceeded\. Earl"
    with pytest.raises(SaveFailed, match=said):
        save_steps("memory://terrazzo-quota", 1)


def test_retention_touches_neither_damaged_ones_nor_what_is_no_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000001" / "manifest.sha256").write_text("")
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "mine").mkdir()
    assert checkpoint.prune(tmp_path, keep_last=1) == ["step-00000002"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mine", "step-00000001", "step-00000003", "step-00000009"]


def test_times_do_not_count(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    os.utime(tmp_path / "step-00000002", (0, 0))
    assert resumed(tmp_path)[0] == 2


def test_a_folder_has_one_writer_and_its_name_is_said(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom terrazzo import checkpoint\nlock = checkpoint.claim(sys.argv[1], 'process 7 on host h')\n"
        "print('mine', flush=True)\nimport time; time.sleep(60)"
    )
    other = Program("-c", code, str(tmp_path))
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(BadInput, match=r"Another run saves in .*: process 7 on host h\."):
        checkpoint.claim(tmp_path, "me")
    other.send_signal(signal.SIGKILL)
    other.communicate()
    lock = checkpoint.claim(tmp_path, "me")
    assert lock is not None
    lock.drop()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match=f"The file system of '{tmp_path}' has no locks"):
        assert checkpoint.claim(tmp_path, "me") is not None


def test_another_format_behind_a_url_is_not_read_and_said() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/terrazzo-foreign/a/model.safetensors", b"")
    for look in (checkpoint.open_source, expand):
        with pytest.raises(BadInput, match="of other formats are read from local paths only: copy"):
            look("memory://terrazzo-foreign/a")
    memory.rm("/terrazzo-foreign", recursive=True)


def test_a_store_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)

    def occupied(self: LocalStore, name: str) -> bool:
        if dist.get_rank() == 0:
            raise RuntimeError("no answer")
        return True

    monkeypatch.setattr(LocalStore, "occupied", occupied)

    def body(rank: int) -> None:
        with pytest.raises(tz.TerrazzoError, match="rank 0: RuntimeError: no answer"):
            checkpoint.load_newest(tmp_path, *built())

    run_in_threads(2, body)


def test_random_generators_continue_where_they_were() -> None:
    import random

    import numpy as np

    random.gauss(0, 1)  # leaves a second value cached
    state = json.loads(json.dumps(capture_rng()))
    drawn = (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    torch.rand(7), random.random(), np.random.random()
    restore_rng(state)
    assert drawn == (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
