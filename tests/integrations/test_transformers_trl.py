"""The examples of TRL's trainers on two gloo ranks, against the same scripts without Terrazzo's mixin."""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from terrazzo.errors import BadInput
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool
from tests.integrations.trainers import PATIENCE_S, apart, for_accelerate, whole

pytest.importorskip("trl")
pytest.importorskip("peft")
EXAMPLES = Path(__file__).parents[2] / "examples" / "trl"
MIXIN = "TerrazzoTrainerMixin, "


def _run(script: Path, folder: Path, *words: str) -> dict[str, Any]:
    """A script's names once it has run in `folder`."""
    argv, there = list(sys.argv), Path.cwd()
    os.chdir(folder)
    try:
        sys.argv[:] = [str(script), *words]
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        os.chdir(there)
        sys.argv[:] = argv


def _both(folder: Path, name: str) -> dict[str, Any]:
    for_accelerate()
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert text.count(f"({MIXIN}") == 1
    if dist.get_rank() == 0:
        _run(EXAMPLES / "tiny_model.py", folder, "my-model")
        (folder / "theirs").mkdir()
        (folder / name).write_text(text.replace(f"({MIXIN}", "("), encoding="utf-8")
    dist.barrier()
    model = str(folder / "my-model")
    theirs = _run(folder / name, folder / "theirs", model)["trainer"]
    ours = _run(EXAMPLES / name, folder, model)["trainer"]
    dist.barrier()

    def logged(trainer: Any) -> list[dict[str, float]]:
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    names = ("loss", "rewards/margins", "reward", "entropy", "completions/mean_length", "mean_token_accuracy", "kl")
    return {
        "ours": _split(ours.model),
        "theirs": _split(theirs.model),
        "losses": [entry["loss"] for entry in logged(ours)],
        "logged": max(
            abs(one[name] - other[name])
            for one, other in zip(logged(ours), logged(theirs), strict=True)
            for name in names
            if name in other
        ),
        "weights": apart(whole(ours.model), _plain(theirs.model)),
        "written": sorted(str(path.relative_to(folder / "runs")) for path in folder.glob("runs/*/*") if path.is_dir()),
    }


def _split(model: Any) -> bool:
    return hasattr(model, "_terrazzo")


def _plain(model: Any) -> dict[str, Any]:
    return {name.removeprefix("module."): value.detach() for name, value in model.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize("name", mostly_long(["dpo", "grpo", "sft", "reward"], "dpo"))
def test_the_example_trains_as_without_terrazzo(two_processes: Pool, tmp_path: Path, name: str) -> None:
    for found in two_processes.run(_both, tmp_path, f"{name}.py", timeout_s=PATIENCE_S):
        assert (found["ours"], found["theirs"]) == (True, False)
        assert len(set(found["losses"])) == len(found["losses"]) > 3, "something is learnt"
        assert found["logged"] <= 1e-6
        assert found["weights"] <= 1e-6
        last = len(found["losses"])
        assert found["written"] == [f"{name}/checkpoint-{last}", f"{name}/final"]


# -- what is refused -----------------------------------------------------------------------------------------------


def _asked(folder: Path, name: str) -> Any:
    """TrainingArguments with one of TRL's switches on."""
    import transformers
    import trl

    assert name in {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to="none")
    setattr(arguments, name, True)
    return arguments


@pytest.mark.parametrize("name", ["sync_ref_model", "use_vllm"])
def test_what_needs_whole_weights_is_refused_where_they_are_split(tmp_path: Path, name: str) -> None:
    from terrazzo.integrations.transformers.requested import check, check_split

    arguments = _asked(tmp_path, name)
    check(arguments, nn.Linear(2, 2))
    with pytest.raises(BadInput, match=f"Plan zero3 splits weights: {name} .*: leave it out, or use zero2"):
        check_split(arguments, "zero3")


def test_continuous_batching_is_refused(tmp_path: Path) -> None:
    from terrazzo.integrations.transformers.requested import check

    name = "use_transformers_continuous_batching"
    with pytest.raises(BadInput, match=name):
        check(_asked(tmp_path, name), nn.Linear(2, 2))
