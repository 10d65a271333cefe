"""`terrazzo init`: what it asks, what it writes, and that `terrazzo plan` and `terrazzo train` take it."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import load_config
from terrazzo.errors import BadInput
from terrazzo.planner import Estimate, model_shape
from terrazzo.planner import plan as planned
from terrazzo.train.preflight import check
from tests.planner.test_emit import TINY


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder on a machine without GPUs, on which nothing was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["init", *map(str, arguments)])


def written(*arguments: Any) -> dict[str, Any]:
    result = run("mine.yaml", "--yes", *arguments)
    assert result.exit_code == 0, result.exception
    document: dict[str, Any] = yaml.safe_load(Path("mine.yaml").read_text())
    return document


def refused(*arguments: Any) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    return str(result.exception)


def folder_of_a_model(name: str = "model") -> Path:
    folder = Path(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["decoder", "pretrain", "finetune"])
@pytest.mark.parametrize(("goal", "rate"), [("pretrain", 3e-4), ("finetune", 2e-5)])
def test_a_folder_is_no_keyword_whatever_it_is_called(name: str, goal: str, rate: float) -> None:
    folder_of_a_model(name)
    document = written("--goal", goal, "--model", name, "--ranks", 1)
    assert (document["model"]["kind"], document["model"]["path"]) == ("huggingface", name)
    assert document["optimizer"]["lr"] == rate
    Path("mine.yaml").unlink()
    too_long = ("--ranks", 1, "--seq", 512)
    assert "has positions for 256 tokens" in refused("mine.yaml", "--yes", "--goal", goal, "--model", name, *too_long)


# -- what is written -----------------------------------------------------------------------------------------------


def test_comments_are_broken_between_words() -> None:
    written("--ranks", 1)
    comments = [line for line in Path("mine.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("micro-batches" in line for line in comments)
    assert not any(line.endswith("-") for line in comments)


@pytest.mark.parametrize("arguments", [("--ranks", 2), ("--model", "gpt2")], ids=str)
def test_what_is_written_for_this_machine_is_planned_and_would_start(arguments: tuple[Any, ...]) -> None:
    document = written(*arguments)
    config = load_config(Path("mine.yaml"))
    assert config.launch.ranks == document["launch"]["ranks"] == (2 if "--ranks" in arguments else 1)
    assert config.precision.name == "fp32"
    check(config, config.launch.ranks)
    if config.model.kind == "huggingface":  # whose plan is traced, in seconds
        return
    plan = CliRunner().invoke(cli.app, ["plan", "mine.yaml", "--json"])
    assert plan.exit_code == 0, plan.exception
    assert json.loads(plan.stdout)["setup"]["strategy"] == document["plan"]["name"]


@pytest.mark.parametrize(
    ("model", "gpu", "ranks"), [("llama3-8b", "h100-sxm", 8), ("llama3-8b", "rtx-4090", 8), ("gpt2", "v100", 1)]
)
def test_for_a_named_gpu_it_is_what_the_planner_says_fits_there(model: str, gpu: str, ranks: int) -> None:
    document = written("--model", model, "--gpu", gpu, "--ranks", ranks, "--seq", 1024)
    batch, train = document["batch"], document["train"]
    assert document["precision"]["name"] == ("fp16" if gpu == "v100" else "bf16")
    options = {"sequence": 1024, "precision": document["precision"]["name"], "micro_batch": batch["micro_batch"]}
    options |= {"global_batch": batch["global_batch"], "checkpointing": train["activation_checkpointing"]}
    found = planned(model, ranks, gpu=gpu, strategy=document["plan"]["name"], **options)
    assert isinstance(found, Estimate)
    assert found.memory.fits_surely is not False
    assert ("@" in document["plan"]["name"]) == (gpu == "rtx-4090")
    assert model_shape(str(document["model"]["path"])).numel == model_shape(model).numel
    assert load_config(Path("mine.yaml")).launch.ranks == ranks


def test_comments_say_why() -> None:
    written("--model", "llama3-8b", "--gpu", "h100-sxm", "--ranks", 8)
    text = Path("mine.yaml").read_text()
    above = text.partition("\nplan:")[0].rpartition("\n\n")[2]
    assert "compared for 8 x H100-SXM5-80GB" in above
    assert "is expected to be the fastest that fits" in above
    assert "zero0 does not fit: weights, gradients and optimizer alone need 135 GiB; the device has 79.1" in above
    for section in ("model", "precision", "batch", "optimizer", "train"):
        assert text.partition(f"\n{section}:")[0].rpartition("\n")[2].startswith("# ")


def test_a_model_of_ones_own_is_fine_tuned_from_its_weights() -> None:
    folder = folder_of_a_model()
    document = written("--goal", "finetune", "--model", folder)
    assert document["model"] == {"kind": "huggingface", "path": "model", "weights": "pretrained"}
    assert document["batch"]["sequence_length"] == 256  # the model's positions
    assert document["optimizer"]["lr"] < 1e-4


# -- what is asked -------------------------------------------------------------------------------------------------


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    """A terminal at which these are typed; the questions that were asked."""
    asked: list[str] = []
    answers: Iterator[str] = iter(lines)

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return next(answers)

    monkeypatch.setattr(sys.modules["terrazzo.cli.init.command"], "_can_ask", lambda: True)
    monkeypatch.setattr("builtins.input", ask)
    return asked


def test_enter_takes_every_default_and_an_impossible_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typed(monkeypatch, "", "", "", "", "2", "", "33", "64", "")
    result = run()
    assert result.exit_code == 0, result.exception
    assert "--global-batch is 33, which 2 ranks cannot share: take 32 or 34." in result.stderr
    assert [prompt.partition("[")[2] for prompt in asked[5:]] == ["256]: ", "32]: ", "32]: ", "1000]: "]
    document = yaml.safe_load(Path("train.yaml").read_text())
    assert (document["batch"]["global_batch"], document["launch"]["ranks"]) == (64, 2)
    assert document["data"]["source"] == "python-stdlib"


def test_text_that_is_not_there_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typed(monkeypatch, "", "", "nofile.txt", *[""] * 6)
    result = run()
    assert result.exit_code == 0, result.exception
    assert "'nofile.txt' does not exist" in result.stderr
    assert [prompt.partition(":")[0] for prompt in asked[2:4]] == ["Text"] * 2


def test_what_is_given_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typed(monkeypatch, *[""] * 5)
    assert run("--goal", "pretrain", "--steps", 10, "--ranks", 1).exit_code == 0
    assert [prompt.partition(":")[0] for prompt in asked[:2]] == ["Model", "Text"]
    assert len(asked) == 5


def test_without_a_terminal_nothing_is_asked() -> None:
    said = refused("--goal", "pretrain", "--model", "decoder")
    assert "There is no terminal to ask on, and these are not given: --data, --gpu, --ranks, --seq" in said
    everything = {"goal": "pretrain", "model": "decoder", "data": "python-stdlib", "gpu": "here", "ranks": 1}
    everything |= {"seq": 64, "global-batch": 8, "steps": 5}
    given = [word for name, value in everything.items() for word in (f"--{name}", value)]
    assert run(*given).exit_code == 0


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_file_is_never_replaced_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.yaml").write_text("mine")
    assert "'train.yaml' exists, and is not replaced" in refused("--yes")
    assert run("--yes", "--overwrite").exit_code == 0
    Path("train").mkdir()
    Path("train/config.json").write_text("{}")
    assert "the config of another model" in refused("--yes", "--overwrite", "--model", "gpt2")


def test_where_a_file_is_to_stay_another_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.yaml", "other.yaml"):
        Path(name).write_text("mine")
    replaced = iter([False, False])
    monkeypatch.setattr("typer.confirm", lambda _: next(replaced))
    asked = typed(monkeypatch, "other.yaml", "new.json", "", *[""] * 8)
    result = run()
    assert result.exit_code == 0, result.exception
    assert asked[:3] == [f"Another file to write [{name}-2.yaml]: " for name in ("train", "other", "other")]
    assert "must end with .yaml" in result.stderr
    assert [Path(name).read_text() for name in ("train.yaml", "other.yaml")] == ["mine"] * 2
    assert load_config(Path("other-2.yaml")).train.steps == 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine.json",), "must end with .yaml or .yml"),
        (("nowhere/mine.yaml",), "there is no folder 'nowhere'"),
        (("--goal", "fintune"), "Did you mean 'finetune'?"),
        (("--goal", "finetune"), "--model has no default here"),
        (("--goal", "finetune", "--model", "gpt2"), "holds no weights to begin from"),
        (("--model", "gtp2"), "Did you mean 'gpt2'? '?' lists the presets."),
        (("--model", "dekoder"), "Did you mean 'decoder'?"),
        (("--model", "?"), "smollm2-135m, "),
        (("--gpu", "?"), "RTX4090, "),
        (("--gpu", "h1000"), "There is no GPU 'h1000'"),
        (("--ranks", "0"), "--ranks is '0', expected a whole number"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--model", "gpt2", "--seq", "4096"), "gpt2 has positions for 1024 tokens"),
        (("--model", "llama3-70b", "--gpu", "rtx-4090", "--ranks", "1"), "offload included. Nearest is "),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_nothing_is_written(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("--yes", *arguments)
    assert list(Path().iterdir()) == []


def test_a_file_of_another_kind_is_refused_before_the_planner_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "terrazzo.cli.init.document", None)
    assert "must end with .yaml or .yml" in refused("--yes", "mine.json")


def test_a_file_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk names no file, and what was there stays as it was: half a configuration would be read as one."""
    real = Path.write_text

    def full(path: Path, text: str, **more: Any) -> None:
        real(path, text[: len(text) // 2], **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    Path("mine.yaml").write_text("before")
    monkeypatch.setattr(Path, "write_text", full)
    assert refused("mine.yaml", "--yes", "--overwrite") == "'mine.yaml' cannot be written: No space left on device."
    assert [path.name for path in Path().iterdir()] == ["mine.yaml"]
    assert Path("mine.yaml").read_text() == "before"
