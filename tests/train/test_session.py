"""Sessions in this process: what is never saved, what a resumed run says, what a new run removes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo.checkpoint import complete_checkpoints, latest
from terrazzo.errors import BadInput, Diverged
from terrazzo.train import loop
from terrazzo.train.config import Config
from terrazzo.train.config_file import config_from_dict
from terrazzo.train.huggingface import weight_files
from terrazzo.train.loop import Trainer
from terrazzo.train.ranks import Ranks
from terrazzo.train.session import open_session
from terrazzo.train.stop import StopRequest
from tests.helpers.threads import run_in_threads

ALONE = Ranks(0, 1, torch.device("cpu"))


def config_in(folder: Path, **sections: dict[str, Any]) -> Config:
    text = folder / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(600)))
    values: dict[str, dict[str, Any]] = {
        "model": {"dim": 16, "layers": 1, "heads": 2},
        "data": {"source": str(text), "validation_fraction": 0.0, "cache": str(folder / "cache")},
        "batch": {"global_batch": 2, "micro_batch": 2, "sequence_length": 16},
        "optimizer": {"lr": 0.003},
        "train": {"steps": 4, "sample_tokens": 0},
        "checkpoint": {"every": 1},
        "log": {"every": 10, "folder": str(folder / "run"), "tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config_from_dict(values)


class NeverStop(StopRequest):
    """Signals belong to the main thread; ranks are threads here."""

    def __init__(self) -> None:
        pass

    def agreed(self) -> bool:
        return False


def trained(config: Config) -> int:
    def body(rank: int) -> int:
        trainer = Trainer(open_session(config, ALONE), NeverStop())
        try:
            return trainer.run()
        finally:
            trainer.session.loader.close()
            for sink in trainer.report._sinks:
                sink.close()

    return run_in_threads(1, body)[0]


def spoil_the_third_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN gradients in step 3, behind a finite loss."""
    real, calls = loop.summed_loss, []

    def summed_loss(*arguments: Any) -> Tensor:
        loss = real(*arguments)
        calls.append(loss.item())
        if len(calls) == 3:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    monkeypatch.setattr(loop, "summed_loss", summed_loss)


def test_a_finite_loss_with_a_nan_gradient_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_the_third_gradient(monkeypatch)
    with pytest.raises(Diverged, match=r"norm of step 3 is nan.*up to step 2 are intact"):
        trained(config_in(tmp_path))
    saved = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000001", "step-00000002"]


def test_under_fp16_such_a_step_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_the_third_gradient(monkeypatch)
    assert trained(config_in(tmp_path, precision={"name": "fp16"})) == 0
    assert latest(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step-00000004"


def test_a_resumed_run_names_what_differs_and_which_value_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config_in(tmp_path))
    assert "resume: " not in capsys.readouterr().out
    changed = config_in(tmp_path, optimizer={"lr": 5.0}, batch={"micro_batch": 1}, train={"steps": 6})
    trained(changed)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("resume: ")]
    assert lines == [
        "resume: batch.micro_batch is 1 in the configuration, which is used, and 2 in the checkpoint",
        "resume: optimizer.lr is 5.0 in the configuration and 0.003 in the checkpoint, which is used",
    ]
    header = out[: out.index("step 6/6")]
    assert "units" in header
    assert "precision:" in header
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert {group["initial_lr"] for group in manifest["optimizer"]["groups"]} == {0.003}


def test_an_overwriting_run_that_cannot_start_removes_nothing(tmp_path: Path) -> None:
    trained(config_in(tmp_path))
    folder = tmp_path / "run" / "checkpoints"
    saved = complete_checkpoints(folder)
    anew = {"resume": "never", "overwrite": True}
    with pytest.raises(BadInput):
        trained(config_in(tmp_path, checkpoint=anew, plan={"units": ["NoSuchBlock"]}))
    assert complete_checkpoints(folder) == saved
    trained(config_in(tmp_path, checkpoint=anew, train={"steps": 1}))
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000001"]


def test_absent_pretrained_weights_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set model\.weights to random"):
        weight_files(tmp_path)
