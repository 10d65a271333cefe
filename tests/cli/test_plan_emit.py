"""`terrazzo plan --emit`: the file trains the model that was planned, on data that its user names, and says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import load_config
from terrazzo.errors import BadInput
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.preflight import check
from tests.planner.test_emit import TINY

CPU = ["--gpu", "cpu", "--gpus", "1", "--precision", "fp32", "--seq", "32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights or tokenizer."""
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(TINY))
    return made


def emit(model: Path | str, path: Path, *options: str) -> str:
    result = CliRunner().invoke(cli.app, ["plan", "--model", str(model), *CPU, *options, "--emit", str(path)])
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_run_does_not_start_before_its_data_is_named(folder: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    said = emit(folder, path)
    assert said.splitlines()[-1].endswith("data.source=... data.tokenizer=...")
    with pytest.raises(BadInput, match=r"data\.source and data\.tokenizer are still FILL-IN") as caught:
        check(load_config(path), 1)
    assert "data.source=... data.tokenizer=..." in str(caught.value)
    named = load_config(path, ["data.source=python-stdlib", "data.tokenizer=bytes"])
    check(named, 1)
    built = prepare_model(named)
    assert (
        sum(each.numel() for each in built.parameters())
        == 2 * 512 * 64 + 2 * (64 * 64 * 3 + 3 * 128 * 64 + 2 * 64) + 64
    )


def test_how_the_model_begins_is_written_and_is_its_weights_where_they_are(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    emit(folder, path)
    text = path.read_text()
    assert yaml.safe_load(text)["model"]["weights"] == "random"
    assert re.search(r"# .*begin as random numbers.*\n(# .*\n)*.*pretrained\.\nmodel:", text)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    path.unlink()
    emit(folder, path)
    written = yaml.safe_load(path.read_text())
    assert written["model"] == {"kind": "huggingface", "path": str(folder), "weights": "pretrained"}
    assert written["data"] == {"source": "FILL-IN", "tokenizer": str(folder)}


def test_adapters_begin_beside_weights_that_are_there(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    emit(folder, path, "--lora", "4")
    text = path.read_text()
    assert "Put its *.safetensors there" in text and "random" not in text
    config = load_config(path, ["data.source=python-stdlib", "data.tokenizer=bytes"])
    assert (config.lora.rank, config.model.weights) == (4, "pretrained")
    (folder / "model.safetensors").write_bytes(b"")
    path.unlink()
    emit(folder, path, "--lora", "4")
    assert "safetensors" not in path.read_text()


def test_comments_say_what_was_planned_and_what_to_fill_in(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.yaml"
    emit("gpt2", path)
    text = path.read_text()
    assert text.startswith("# Written by `terrazzo plan --emit`")
    assert "expected (at most " in text.splitlines()[1]
    assert "To plan it again" not in text, "it is for this machine"
    data = text.partition("\ndata:")[0].rpartition("\n\n")[2]
    assert "Fill in data.source and data.tokenizer" in data.replace("\n# ", " ")
    assert "tokens in a step" in text


def test_what_is_emitted_is_planned_again_without_its_data(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.yaml"
    emit("gpt2", path, "--strategy", "zero2")
    result = CliRunner().invoke(cli.app, ["plan", str(path), "--json", "--gpu", "h100-sxm"])
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["setup"]["strategy"] == "zero2"
    path.unlink()
    emit("gpt2", path, "--gpu", "h100-sxm")
    assert "# To plan it again: `terrazzo plan FILE --gpu H100-SXM5-80GB`." in path.read_text().splitlines()


def test_what_was_filled_in_is_not_replaced(tmp_path: Path) -> None:
    """The command that `plan` prints can be repeated, as long as nobody has changed the file."""
    path = tmp_path / "gpt2.yaml"
    emit("gpt2", path)
    emit("gpt2", path)
    path.write_text(mine := path.read_text().replace("FILL-IN", "mine.txt", 1))
    error = CliRunner().invoke(cli.app, ["plan", "--model", "gpt2", *CPU, "--emit", str(path)]).exception
    assert isinstance(error, BadInput)
    assert f"--emit would replace '{path}'" in str(error)
    assert path.read_text() == mine


def test_a_full_disk_is_said_of_its_file(tmp_path: Path) -> None:
    """The system names none in this error."""
    path = tmp_path / "gpt2.yaml"
    path.symlink_to("/dev/full")
    words = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--strategy", "zero1", "--emit", str(path)]
    error = CliRunner().invoke(cli.app, ["plan", *words]).exception
    assert isinstance(error, BadInput)
    assert str(error).startswith(f"'{path}' cannot be written: No space left on device")
