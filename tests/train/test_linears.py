"""Runs whose linear layers multiply in 8-bit floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import latest, open_source
from terrazzo.config import Config, config_from_dict
from terrazzo.errors import BadInput
from terrazzo.nn.float8_linear import FLOAT8
from terrazzo.train.model.linears import try_linears
from terrazzo.train.model.prepare import ModelOnPaper, prepare_model
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight.shared_axes import check_axes
from tests.train.test_session import config_in, trained

MODEL = {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 48, "tie_embeddings": False}
EIGHT = {"name": "bf16", "linears": "fp8-rowwise"}


def run(folder: Path, **sections: Any) -> Config:
    return config_in(folder, **{"model": MODEL, **sections})


def states(folder: Path) -> dict[tuple[str, str], str]:
    """The dtype of every state of the newest checkpoint."""
    found = open_source(str(latest(folder / "run" / "checkpoints"))).tensors
    return {(name, kind): str(state.dtype) for name, each in found.items() for kind, state in each.states.items()}


def test_a_run_says_what_multiplies_in_eight_bits_and_goes_on_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, steps = run(tmp_path, precision={"name": "bf16"}), {"steps": 6}
    assert trained(plain) == 0
    before = states(tmp_path)
    capsys.readouterr()
    assert trained(run(tmp_path, precision=EIGHT, train=steps)) == 0
    out = capsys.readouterr().out
    assert "precision: float8 rowwise in 14 linear layers; not head: outside of the blocks" in out
    changed = [line.replace('"', "") for line in out.splitlines() if line.startswith("resume: precision.linears")]
    assert changed == [
        "resume: precision.linears is fp8-rowwise in the configuration, which is used, and compute in the checkpoint"
    ]
    assert states(tmp_path) == before
    assert trained(run(tmp_path, precision={"name": "bf16"}, train={"steps": 7})) == 0
    assert "resume: precision.linears is compute" in capsys.readouterr().out.replace('"', "")


def test_layers_are_chosen_by_globs(tmp_path: Path) -> None:
    config = run(tmp_path, precision={**EIGHT, "skip": ["*.feed_forward.*", "head"]})
    named = {name for name, module in prepare_model(config).named_modules() if FLOAT8.find(module)}
    assert named == {f"blocks.{n}.attention.{each}" for n in range(2) for each in ("query", "key", "value", "output")}


def test_the_planner_is_told(tmp_path: Path) -> None:
    found = setup_of(run(tmp_path, precision=EIGHT), 1)
    assert (found.matmul, found.recipe) == ("fp8", "rowwise")


@pytest.mark.parametrize(
    ("precision", "word"),
    [
        ({"skip": ["head"]}, "remove skip"),
        ({"name": "fp16", "linears": "fp8-rowwise"}, "set precision.name to 'bf16'"),
        ({"name": "bf16", "compute": "fp64", "linears": "fp8-rowwise"}, "set precision.name to 'bf16'"),
        ({"name": "fp8"}, "precision.linears='fp8-tensorwise'"),
    ],
)
def test_what_does_not_go_together_is_refused(precision: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        config_from_dict({"precision": precision})


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"precision.linears is .fp8-rowwise.*layers.*matches no linear layer"):
        prepare_model(run(tmp_path, precision={**EIGHT, "skip": ["layers.*"]}))


def test_parts_of_matrices_that_do_not_fit_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    sharing = {"plan": {"mesh": {"tp": 2}}, "precision": EIGHT}
    config = run(tmp_path, **sharing, model={**MODEL, "ffn_dim": 64})
    check_axes(config, ModelOnPaper(config))
    config = run(tmp_path, **sharing)
    with pytest.raises(
        BadInput, match=r"with precision.linears .*feed_forward.down.* has 32 x 24, whose sizes are no multiples of 16"
    ):
        check_axes(config, ModelOnPaper(config))


def test_what_comes_back_in_bf16_needs_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cuda.*fp32: set precision.name to bf16"):
        try_linears(run(tmp_path, precision={"linears": "fp8-rowwise"}), torch.device("cuda"))
