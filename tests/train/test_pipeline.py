"""`terrazzo train` with layers that ranks share: one run with stages and without."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from terrazzo.config import config_from_dict, load_config
from terrazzo.errors import BadInput
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.preflight import check
from terrazzo.train.preflight.shared_axes import check_axes
from terrazzo.train.report.mesh_picture import mesh_picture
from tests.helpers.cover import mostly_long
from tests.test_commands import ROOT
from tests.train.test_context import settings
from tests.train.test_preferences import lines, train
from tests.train.test_tensor import run_folder

EXPERTS = {
    "experts": {"count": 4, "top_k": 2, "ffn_dim": 16, "z_loss": 0.01},
    "attention": {"window": 5, "full_every": 2},  # stages of layers that see other tokens
}


def staged(folder: Path, ranks: int, mesh: dict[str, int], plan: str = "zero3", **more: Any) -> dict[str, Any]:
    """Two sequences are held out."""
    model = {"layers": 4} | more.pop("model", {})
    values = settings(folder, ranks, 1, **{"model": model, "train": {"sample_tokens": 0}, **more})
    values["plan"] = {"name": plan, "mesh": mesh}
    values["train"] |= {"eval_batches": 2} if "eval_batches" not in more.get("train", {}) else {}
    values["log"]["folder"] = str(folder / f"run-{'-'.join(f'{axis}{size}' for axis, size in mesh.items())}-{plan}")
    return values


@cache
def alone(experts: bool) -> Path:
    """The folder of a run on one rank."""
    values = staged(Path(mkdtemp()), 1, {}, model=EXPERTS if experts else {})
    train(values, 1)
    return run_folder(values)


def said(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    steps = [[line["loss"], line["grad_norm"], line["tokens"]] for line in lines(folder, "train")]
    return torch.tensor(steps), torch.tensor([line["loss"] for line in lines(folder, "validation")])


def summary_as_alone(values: dict[str, Any], ranks: int, experts: bool) -> dict[str, Any]:
    """The summary of a run that goes on from the first step of the run of one rank, and says what that says."""
    expected = alone(experts)
    first = "checkpoints/step-00000001"  # threads draw from one random generator
    shutil.copytree(expected / first, run_folder(values) / first)
    train(values, ranks)
    (steps, validation), (its_steps, its_validation) = said(run_folder(values)), said(expected)
    torch.testing.assert_close(steps, its_steps[1:], rtol=2e-5, atol=0)
    torch.testing.assert_close(validation, its_validation, rtol=2e-5, atol=0)
    (summary,) = lines(run_folder(values), "summary")
    return summary


@pytest.mark.parametrize(
    ("mesh", "ranks", "plan", "more"),
    [
        pytest.param({"pp": 2}, 2, "zero0", {}, marks=pytest.mark.long),
        ({"pp": 2}, 2, "zero3@cpu", {"parallel": {"pipeline": {"chunks": 2}}}),
        pytest.param(
            {"pp": 2, "tp": 2}, 4, "zero3", {"parallel": {"pipeline": {"schedule": "gpipe"}}}, marks=pytest.mark.long
        ),
        pytest.param({"pp": 2}, 4, "zero2", {"train": {"eval_batches": 1, "sample_tokens": 0}}, marks=pytest.mark.long),
        pytest.param(  # as in test_head_loss
            {"pp": 2, "tp": 2},
            4,
            "zero3@cpu",
            {"parallel": {"pipeline": {"schedule": "zero_bubble"}}},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"pp": 2, "cp": 2, "ep": 2}, 4, "zero3", {"model": EXPERTS}, marks=pytest.mark.long
        ),  # test_six_axes
    ],
    ids=str,
)
def test_stages_train_as_one_rank_does(
    tmp_path: Path, mesh: dict[str, int], ranks: int, plan: str, more: dict[str, Any]
) -> None:
    summary = summary_as_alone(staged(tmp_path, ranks, mesh, plan, **more), ranks, experts="model" in more)
    for what in ("state_bytes", "transient_bytes", "host_bytes", "traffic_bytes"):
        assert summary[f"{what}_promised"] == summary[f"{what}_measured"], what


def test_a_run_in_stages_is_ended_by_others_and_the_other_way_round(tmp_path: Path) -> None:
    for first, then in (({"pp": 2}, {}), ({}, {"pp": 2})):
        folder = tmp_path / str(len(first))
        folder.mkdir()
        values = staged(folder, 2, first, train={"sample_tokens": 0, "eval_batches": 2 if first else 1})
        name = "checkpoints/step-00000001"
        shutil.copytree(alone(False) / name, run_folder(values) / name)
        train(values, 2, stop_after=2)
        more = {"sample_tokens": 0, "eval_batches": 2 if then else 1}
        train(staged(folder, 2, then, plan="zero1", train=more) | {"log": values["log"]}, 2)
        torch.testing.assert_close(said(run_folder(values))[0], said(alone(False))[0][1:], rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": {"layers": 1}, "parallel": {"pipeline": {"chunks": 4}}}, r"too few for 8 stages"),
        ({"batch": {"global_batch": 1}}, r"A step of 1 micro-batches does not fill a pipeline of 2"),
        ({"train": {"compile": True}}, r"no stage is compiled yet\. Set train\.compile=false"),
        ({"train": {"sample_every": 2}}, r"writes no text \(train\.sample_every\)"),
        ({"objective": {"name": "dpo"}}, r"'dpo' looks at outputs of several forwards"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_anything_is_built(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(staged(tmp_path, 2, {"pp": 2}, **more)), 2)


def test_a_schedule_that_has_one_stage_for_each_rank(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"parallel\.pipeline: The pipeline schedule 'gpipe' has one stage for each"):
        config_from_dict(staged(tmp_path, 2, {"pp": 2}, parallel={"pipeline": {"schedule": "gpipe", "chunks": 2}}))


def test_the_picture_of_stages() -> None:
    assert mesh_picture({"pp": 2, "dp_replicate": 2, "dp_shard": 2}) == [
        "[0] [1] || [2] [3] → [4] [5] || [6] [7]   pp 2 × dp_replicate 2 × dp_shard 2",
        "each [ ] reads its own sequences, the same in all stages, → the next layers (pp 2), || parts copies",
    ]


def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    source = tmp_path / "text.txt"
    source.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(2000)))
    changes = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", f"data.source={source}"]
    config = load_config("examples/pipeline.yaml", [*changes, "train.steps=1", "schedule.warmup_steps=0"])
    check(config, 2)
    train(config.model_dump(mode="json"), 2)
    (line,) = lines(tmp_path / "run", "train")
    assert line["tokens"] == 8 * 64


QWEN = {
    "model_type": "qwen3",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def of_transformers(folder: Path, mesh: dict[str, int], ranks: int, **changes: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    values = staged(folder, ranks, mesh, "zero2") | {"model": {"kind": "huggingface", "path": str(folder)}}
    values["train"] |= {"steps": 3}
    return values


@pytest.mark.parametrize(
    ("mesh", "ranks", "more"),
    [
        ({"pp": 2}, 2, {"tie_word_embeddings": True}),
        pytest.param({"pp": 2, "tp": 2}, 4, {"tie_word_embeddings": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stages_of_a_model_of_transformers_train_as_one_rank_does(
    tmp_path: Path, mesh: dict[str, int], ranks: int, more: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    alone, values = (of_transformers(tmp_path, axes, count, **more) for axes, count in (({}, 1), (mesh, ranks)))
    train(alone, 1)
    first = "checkpoints/step-00000001"
    shutil.copytree(run_folder(alone) / first, run_folder(values) / first)
    train(values, ranks)
    (steps, validation), (its_steps, its_validation) = said(run_folder(values)), said(run_folder(alone))
    torch.testing.assert_close(steps, its_steps[1:], rtol=2e-5, atol=0)
    torch.testing.assert_close(validation, its_validation, rtol=2e-5, atol=0)
    (summary,) = lines(run_folder(values), "summary")
    for what in ("state_bytes", "transient_bytes", "traffic_bytes"):
        assert summary[f"{what}_promised"] == summary[f"{what}_measured"], what


@pytest.mark.parametrize("kind", ["gpt2", "stablelm"])
def test_models_of_transformers_without_stages_are_refused_before_anything_is_built(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    config = config_from_dict(of_transformers(tmp_path, {"pp": 2}, 2, model_type=kind))
    with pytest.raises(BadInput, match=r"plan\.mesh\.pp 2: Nothing says how values go through a "):
        check_axes(config, ModelOnPaper(config))


@pytest.mark.parametrize("name", mostly_long(["AdamW", "Muon"], "Muon"))
def test_a_stage_without_parameters_of_a_group_has_the_group(name: str, tmp_path: Path) -> None:
    """The first of two stages of one block is the embedding, which has no norm, and to Muon no matrix."""
    more = {"model": {"layers": 1}, "optimizer": {"name": name}}
    expected, values = staged(tmp_path, 1, {}, **more), staged(tmp_path, 2, {"pp": 2}, **more)
    train(expected, 1)
    first = "checkpoints/step-00000001"
    shutil.copytree(run_folder(expected) / first, run_folder(values) / first)
    train(values, 2)
    torch.testing.assert_close(said(run_folder(values))[0], said(run_folder(expected))[0][1:], rtol=2e-5, atol=0)
