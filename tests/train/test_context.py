"""`terrazzo train` with sequences that ranks share: each token counts once, whatever the mesh."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.preflight import check
from terrazzo.train.session.data_share import DataShare
from tests.helpers import programs
from tests.helpers.threads import run_in_threads
from tests.train.test_loop import environment
from tests.train.test_preferences import lines, train

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}


def settings(folder: Path, ranks: int, cp: int, mode: str = "gather", **more: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(600)))
    values: dict[str, Any] = {
        "model": {**SIZES},
        "data": {"source": str(text), "cache": str(folder / "cache"), "validation_fraction": 0.2},
        "plan": {"name": "zero3", "mesh": {"cp": cp}},
        "parallel": {"context": {"mode": mode}},
        "batch": {"global_batch": 4, "micro_batch": 1, "sequence_length": 32},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4, "eval_batches": 2 * cp // ranks or 1, "sample_tokens": 8},
        "checkpoint": {"every": 1, "keep_last": None},
        "launch": {"ranks": ranks, "device": "cpu", "threads": 1},
        "log": {"every": 1, "folder": str(folder / f"run-{ranks}-{cp}-{mode}"), "tensorboard": False},
    }
    for section, changes in more.items():
        values[section] = values.get(section, {}) | changes
    return values


def said(folder: Path) -> tuple[list[list[float]], list[float], Any]:
    """Losses, gradients' norms and tokens of each step; the validation; the sample."""
    steps = [[line["loss"], line["grad_norm"], line["tokens"]] for line in lines(folder, "train")]
    (sample,) = lines(folder, "sample")
    return steps, [line["loss"] for line in lines(folder, "validation")], sample["text"]


@cache
def alone(attention: str) -> Path:
    """The folder of a run on one rank, which evaluates as many sequences as the others together."""
    folder = Path(mkdtemp())
    values = settings(folder, 1, 1, data=apart(folder, attention))
    train(values, 1)
    return Path(values["log"]["folder"])


def begin_alike(values: dict[str, Any], attention: str, step: int = 1) -> None:
    """Threads draw from one random generator: the others continue from the first step of the run on one rank."""
    name = f"checkpoints/step-{step:08}"
    shutil.copytree(alone(attention) / name, Path(values["log"]["folder"]) / name)


def check_alike(values: dict[str, Any], attention: str, validated: bool = True) -> None:
    """Within what another order of sums may change. `validated`: the same sequences are held out."""
    found, expected = said(Path(values["log"]["folder"])), said(alone(attention))
    assert [step[2] for step in found[0]] == [step[2] for step in expected[0][1:]]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0][1:]), rtol=2e-5, atol=0)
    if validated:
        torch.testing.assert_close(found[1], expected[1], rtol=2e-5, atol=0)
    assert found[2] == expected[2]


def apart(folder: Path, attention: str) -> dict[str, Any]:
    """For `document`: documents of a few lines each, many of which are in one sequence."""
    if attention == "sequence":
        return {}
    source = folder / "documents.jsonl"
    documents = [{"text": "".join(f"{n} after {n - 1}\n" for n in range(m, m + m % 5 + 1))} for m in range(400)]
    source.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return {"source": str(source), "attention": "document"}


WINDOW = {"attention": {"window": 5, "stride": 4, "full_every": 2}}


@cache
def alone_in_windows() -> Path:
    """The folder of a run on one rank whose first layer has a window."""
    folder = Path(mkdtemp())
    values = settings(folder, 1, 1, data=apart(folder, "document"), model=WINDOW)
    train(values, 1)
    return Path(values["log"]["folder"])


@pytest.mark.parametrize(
    ("cp", "tp", "mode", "more"),
    [
        pytest.param(2, 1, "gather", {}, marks=pytest.mark.long),
        pytest.param(2, 2, "ulysses", {"activation_checkpointing": "full"}, marks=pytest.mark.long),
        (1, 2, "gather", {"activation_checkpointing": "selective"}),
    ],
)
def test_windows_are_the_same_on_every_mesh(tmp_path: Path, cp: int, tp: int, mode: str, more: dict[str, Any]) -> None:
    values = settings(tmp_path, cp * tp, cp, mode, data=apart(tmp_path, "document"), model=WINDOW)
    values["plan"]["mesh"]["tp"] = tp
    values["train"] |= {"eval_batches": 2, **more}
    first = "checkpoints/step-00000001"
    shutil.copytree(alone_in_windows() / first, Path(values["log"]["folder"]) / first)
    train(values, cp * tp)
    found, expected = said(Path(values["log"]["folder"])), said(alone_in_windows())
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0][1:]), rtol=2e-5, atol=0)
    (summary,) = lines(Path(values["log"]["folder"]), "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]


@pytest.mark.parametrize(
    ("ranks", "cp", "mode", "attention"),
    [
        pytest.param(2, 2, "gather", "sequence", marks=pytest.mark.long),
        (4, 2, "ulysses", "document"),
        pytest.param(4, 4, "ring", "sequence", marks=pytest.mark.long),
        pytest.param(2, 2, "ring", "document", marks=pytest.mark.long),
    ],
)
def test_every_mesh_trains_alike(tmp_path: Path, ranks: int, cp: int, mode: str, attention: str) -> None:
    values = settings(tmp_path, ranks, cp, mode, data=apart(tmp_path, attention))
    begin_alike(values, attention)
    train(values, ranks)
    check_alike(values, attention)
    (summary,) = lines(Path(values["log"]["folder"]), "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]
    assert summary["peak_memory_bytes_promised"] is not None


@pytest.mark.long  # a run of tp that cp ends: test_tensor
def test_another_mesh_continues_a_run(tmp_path: Path) -> None:
    values = settings(tmp_path, 2, 2)
    begin_alike(values, "sequence")
    train(values, 2, stop_after=2)
    values["train"]["eval_batches"] = 1
    train(values | {"plan": {"name": "zero2", "mesh": {"cp": 1}}}, 2)
    check_alike(values, "sequence")


def test_targets_are_shifted_before_they_are_split() -> None:
    tokens = torch.arange(100, 117)
    batch = Batch(tokens[:-1].unsqueeze(0), tokens[1:].unsqueeze(0).clone(), 16, 16)
    batch.targets[0, 3] = IGNORED

    def body(rank: int) -> tuple[Batch, list[list[int]]]:
        import torch.distributed as dist

        from terrazzo.parallel import Context

        context = Context(dist.group.WORLD)
        part = DataShare(0, 1, context).of(batch)
        assert part.positions is not None
        return part, context.place(part.positions, torch.device("cpu")).tolist()

    (first, _), (second, places) = run_in_threads(2, body)
    assert first.inputs.tolist() == [[100, 101, 102, 103, 112, 113, 114, 115]]
    assert first.targets.tolist() == [[101, 102, 103, IGNORED, 113, 114, 115, 116]]
    assert places == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert (first.samples, second.samples, second.valid_tokens) == (7, 8, 8)


@pytest.mark.parametrize(
    ("ranks", "cp", "more", "message"),
    [
        (4, 3, {}, r"plan.mesh: The mesh cp 3 does not make up the 4 ranks.*must be 4"),
        (2, 2, {"batch": {"sequence_length": 30}}, r"batch.sequence_length: .*4 equal chunks.*28 or 32"),
        (2, 2, {"model": {"heads": 3, "dim": 48, "kv_heads": 3}}, r"model.heads 3 do not divide by 2.*mode=gather"),
        (2, 2, {"objective": {"name": "dpo"}}, r"objective 'dpo' compares whole texts.*plan.mesh.cp=1"),
        (2, 2, {"train": {"compile": True}}, r"train.compile has not been tried.*train.compile=false"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(
    tmp_path: Path, ranks: int, cp: int, more: dict[str, Any], message: str
) -> None:
    values = settings(tmp_path, ranks, cp, "ulysses", **more)
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(values), ranks)


def test_a_window_is_not_sent_around_a_ring(tmp_path: Path) -> None:
    values = settings(tmp_path, 2, 2, "ring", model={"attention": {"window": 8}})
    with pytest.raises(BadInput, match=r"'ring'.*model.attention.window 8.*mode=gather or ulysses"):
        check(config_from_dict(values), 2)


def test_a_model_of_transformers_is_checked_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": 8}))
    values = settings(tmp_path, 2, 2, "ring") | {"model": {"kind": "huggingface", "path": str(tmp_path)}}
    with pytest.raises(BadInput, match=r"'ring'.*sliding window of 8 tokens.*'gather' or 'ulysses'"):
        check(config_from_dict(values), 2)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
def test_processes_train_as_threads_do(tmp_path: Path, mode: str) -> None:
    values = settings(tmp_path, 4, 2, mode)
    begin_alike(values, "sequence")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(values))
    done = programs.run("-m", "terrazzo", "train", str(config), env=environment(), timeout_s=180)
    assert done.returncode == 0, done.stderr
    check_alike(values, "sequence")
