"""Checkpoints that stay on the machine: when a run goes on from one, and when it does not."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from terrazzo.checkpoint import clear, complete_checkpoints, open_source
from terrazzo.checkpoint.series.partner_hosts import CopyResult
from terrazzo.config import Config, config_from_dict
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.train.checkpoints.local_checkpoints import LocalCheckpoints
from terrazzo.train.checkpoints.local_folder import local_checkpoints, local_folder, noted_run
from terrazzo.train.checkpoints.restart_points import restarts_of
from terrazzo.train.checkpoints.resume import resume_from
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.preflight import check
from terrazzo.train.report.stop_notices import cut_short_text
from terrazzo.train.session.build_session import open_session
from terrazzo.train.settings.run_command import RunCommand
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads
from tests.train.test_session import ALONE, StopAfter, config_in


class Crashed(Exception):
    pass


def local_in(folder: Path, every: int | None = None, **checkpoint: Any) -> Config:
    """Nine steps, a checkpoint every two of them on the machine."""
    (folder / "shm").mkdir(exist_ok=True)
    settings = {"every": every, "keep_last": None, "local": {"folder": str(folder / "shm"), "every": 2}, **checkpoint}
    return config_in(folder, train={"steps": 9}, checkpoint=settings, launch={"restarts": 3})


def trained(config: Config) -> int:
    def body(rank: int) -> int:
        with open_session(config, ALONE) as session:
            return TrainingLoop(session, StopAfter(None)).run()

    return run_in_threads(1, body)[0]


def crashed(config: Config, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run, which comes as far as a step and no further."""
    real = TrainingLoop.train_step

    def train_step(self: TrainingLoop) -> None:
        if self.session.step == step:
            raise Crashed
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "train_step", train_step)
        with pytest.raises(Crashed):
            trained(config)


def names(config: Config) -> list[str]:
    """Of what is on the machine."""
    folder = local_folder(config)
    assert folder is not None
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def losses(folder: Path) -> list[tuple[int, float]]:
    found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in found if line["kind"] == "train"]


def state(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / "step-00000009" / "rank-00000.safetensors").read_bytes()


def header(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize("every", mostly_long([None, 5], 5))
def test_a_run_goes_on_from_what_survives_to_the_same_bits(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is the run that nothing has happened to."""
    for name in ("whole", "crashed"):
        (tmp_path / name).mkdir()
    assert trained(config_in(tmp_path / "whole", train={"steps": 9})) == 0
    config = local_in(tmp_path / "crashed", every)
    crashed(config, 7, monkeypatch)
    assert names(config) == ["step-00000006"], "one at a time"
    again = restarts_of(config, ["words"])
    assert (again._newest().step, again._newest().path) == (6, f"{local_folder(config)}/step-00000006")
    lost = f"steps after the newest checkpoint, {local_folder(config)}/step-00000006, are lost"
    assert lost in cut_short_text(config, RunCommand()), "a second Ctrl-C"
    header(capsys)
    assert trained(config) == 0
    assert f"resumed at step 6, from {local_folder(config)}/step-00000006" in header(capsys)
    assert losses(tmp_path / "crashed") == losses(tmp_path / "whole")
    assert state(tmp_path / "crashed") == state(tmp_path / "whole")
    assert names(config) == [] and not os.path.exists(str(local_folder(config))), "the run has ended"
    lines = map(json.loads, (tmp_path / "crashed" / "run" / "metrics.jsonl").read_text().splitlines())
    assert sum(line["phase_s"]["local_save"] for line in lines if line["kind"] == "step") > 0, "apart from saving"


def test_a_local_one_that_a_run_goes_on_from_does_not_count_as_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older local one with copies is of use until one in `checkpoint.folder` is known to be complete."""
    config = local_in(tmp_path, 3, background=True)
    crashed(config, 5, monkeypatch)
    real, complete_steps = LocalCheckpoints.save, list[int]()

    def save(self: LocalCheckpoints, *arguments: Any) -> Any:
        complete_steps.append(arguments[-1])
        return real(self, *arguments)

    monkeypatch.setattr(LocalCheckpoints, "save", save)
    assert trained(config) == 0
    assert complete_steps and set(complete_steps) == {0}, "that of step 6 may still be under way"


def test_one_that_becomes_the_last_keeps_its_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends at the step that it goes on from: what it saves again for others was validated before the crash."""

    def config(steps: int) -> Config:
        values = local_in(tmp_path).model_dump(mode="json", exclude_unset=True)
        values["data"]["validation_fraction"] = 0.2
        return config_from_dict({**values, "train": {"steps": steps, "eval_every": 2, "sample_tokens": 0}})

    crashed(config(9), 7, monkeypatch)
    found = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (loss,) = [line["loss"] for line in found if line["kind"] == "validation" and line["step"] == 6]
    assert trained(config(6)) == 0
    (path,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert open_source(path).extra["metric"] == loss


def test_an_older_one_is_not_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = local_in(tmp_path, every=3)
    crashed(config, 3, monkeypatch)
    assert names(config) == ["step-00000002"]
    assert resume_from(config) == f"{config.checkpoint_folder}/step-00000003"
    header(capsys)
    crashed(config, 5, monkeypatch)
    assert "resumed at step 3\n" in header(capsys)
    assert names(config) == ["step-00000004"]


def test_one_that_is_torn_is_not_used_and_its_step_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = local_in(tmp_path, every=3)
    crashed(config, 5, monkeypatch)
    (torn,) = local_checkpoints(config, f"{config.checkpoint_folder}/step-00000003")
    file = Path(torn) / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    header(capsys)
    crashed(config, 3, monkeypatch)
    assert "resumed at step 3\n" in (said := header(capsys))
    assert f"{torn} is DAMAGED, not used" in said
    assert [name.rpartition("-")[0] for name in names(config)] == ["step-00000004.damaged"]
    crashed(config, 5, monkeypatch)
    assert names(config) == ["step-00000004"]


def test_those_of_another_run_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = local_in(tmp_path)
    crashed(config, 7, monkeypatch)
    assert noted_run(config) and local_checkpoints(config, None) == [resume_from(config)]
    note = Path(config.checkpoint_folder) / ".run"
    note.unlink()  # as when somebody has removed all checkpoints, to begin anew
    assert local_checkpoints(config, None) == []
    crashed(config, 1, monkeypatch)
    assert "resumed" not in header(capsys)
    assert names(config) == [], "what was left of the other run is gone"
    crashed(config, 3, monkeypatch)
    assert noted_run(config) and names(config) == ["step-00000002"]


def test_a_run_that_begins_anew_goes_on_from_its_own_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed(local_in(tmp_path), 7, monkeypatch)
    anew = local_in(tmp_path, resume="never", overwrite=True)
    again = restarts_of(anew, ["words"])
    assert again._newest().step == 0, "what is there is of another run"
    crashed(anew, 1, monkeypatch)
    assert again._newest().step == 0
    crashed(anew, 3, monkeypatch)
    saved = again._newest()
    assert (saved.step, again._words(saved)) == (2, ["words", "checkpoint.resume=if_exists"])


def test_a_copy_that_fails_is_said_once_and_stands_in_metrics_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = LocalCheckpoints.save

    def save(self: LocalCheckpoints, model: Any, optimizer: Any, extra: dict[str, Any], *more: Any) -> CopyResult:
        real(self, model, optimizer, extra, *more)
        return CopyResult(extra["step"] - 2, 2, 0, 0.0, "No copy: hung up.")

    monkeypatch.setattr(LocalCheckpoints, "save", save)
    assert trained(local_in(tmp_path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    back = "to the newest local checkpoint with copies, or to checkpoint.folder"
    assert said.count(f"No copy: hung up. Until there is one, a lost host takes the run back {back}.") == 1
    found = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["not_copied"] for line in found if line["kind"] == "partner"] == [0, 2, 4, 6]


def test_a_strangers_folder_ends_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = local_in(tmp_path)
    folder = str(local_folder(config))
    os.symlink(tmp_path, folder)
    with pytest.raises(SaveFailed, match=r"it is a link, or others can write to it\. Use another checkpoint\.local"):
        trained(config)
    assert local_checkpoints(config, None) == []
    clear(config.checkpoint_folder)
    assert complete_checkpoints(tmp_path) == []


def test_a_full_folder_ends_the_run_and_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = local_in(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SaveFailed, match=r"No space left on device.* whose folder needs room for two: use another, or"):
        trained(config)
    assert names(config) == []


@pytest.mark.parametrize(
    ("local", "ranks", "said"),
    [
        ("s3://bucket/a", 1, r"is to be on the machine: use /dev/shm"),
        ("FOLDER/none", 1, r"which is no folder: make it, or use another"),
        ("$NO_SUCH_DISK/a", 1, r"NO_SUCH_DISK is not in the environment: set it on every host"),
    ],
)
def test_what_cannot_be_is_refused(
    local: str, ranks: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    folder = local.replace("FOLDER", str(tmp_path))
    with pytest.raises(BadInput, match=rf"checkpoint\.local\.folder(:| is) '.*'(, and|,)? {said}"):
        check(config_in(tmp_path, checkpoint={"local": {"folder": folder}}, batch={"global_batch": 4}), ranks)


def test_a_partner_is_refused_where_there_is_one_host(tmp_path: Path) -> None:
    config = local_in(tmp_path, local={"folder": str(tmp_path), "partner": "required"})
    with pytest.raises(BadInput, match=r"checkpoint\.local\.partner is 'required', and there is one host, and nobody"):
        check(config, 1)


def test_the_header_says_where_they_are(tmp_path: Path) -> None:
    config = local_in(tmp_path)
    assert f"local: a checkpoint every 2 steps in {local_folder(config)}, until the run ends" in check(config, 1)


@pytest.mark.parametrize(("partner", "times", "feedback"), [("auto", 4, False), ("none", 2, False), ("none", 2, True)])
def test_what_they_take_of_a_host_is_said(
    partner: str, times: int, feedback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, of the host's own part and of its copy: half each of weights and two moments, in fp32. With error
    feedback each rank has residuals of all matrices, in bf16.
    """
    local = {"folder": str(tmp_path), "partner": partner}
    codes = {"precision": {"name": "bf16", "quantized_reduce": "int4", "error_feedback": True}} if feedback else {}
    config = config_in(tmp_path, model={"dim": 1024, "layers": 4}, checkpoint={"local": local}, **codes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    said = next(note for note in check(config, 2) if "checkpoint.local takes" in note)
    parameters = list(prepare_model(config).parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    residuals = 2 * sum(parameter.numel() for parameter in parameters if parameter.dim() > 1) if feedback else 0
    found = re.search(r"takes up to ([\d.]+) GiB of its drive, of which", said)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(times * (numel * 12 / 2 + residuals) / 2**30, abs=0.01)
