"""Importing DeepSpeed's tensor parallelism: layouts of `test_import_deepspeed`, once for each rank with its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrazzo.checkpoint.importers import open_foreign
from terrazzo.checkpoint.importers.deepspeed import DeepSpeedCheckpoint
from terrazzo.errors import BadInput, Damaged
from tests.checkpoint import test_import_deepspeed as single
from tests.helpers.imported import States, assert_same

states, _modules_of_deepspeed = single.states, single._modules_of_deepspeed  # fixtures

Cut = Callable[[Tensor], tuple[Tensor, Tensor]]

# What the two ranks have of each parameter: uneven parts, of `up.weight` parts of each of two fused matrices.
CUTS: dict[str, Cut] = {
    "embedding.weight": lambda value: (value[:4], value[4:]),
    "down.weight": lambda value: (value[:, :2], value[:, 2:]),
    "up.weight": lambda value: (value[[0, 2]], value[[1]]),
    "up.bias": lambda value: (value[:1], value[1:]),
}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"^tiny$", r"^down\.bias$", r"^lone$"],
    "parameter_with_row_parallelism_patterns": [r"^down\.weight$"],
    "vocabulary_parameter_patterns": [r"^embedding\.weight$"],
    "original_vocab_size": 7,
    "parameter_with_sub_params": [{"patterns": [r"^up\.weight$"], "shape": [(2, 1), 5], "partition_dim": 0}],
    "sub_param_shard_widths": {r"^up\.weight$": [[1, 1], [1, 0]]},
}
LAYOUTS = ["stage 1", "stage 2", "elastic", "BF16_Optimizer"]


def cut_files(layout: str, whole: States, info: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is in the files of two ranks of tensor parallelism, each of which has three data ranks."""
    files: dict[str, Any] = {}
    for rank in range(2):
        own: States = {
            (name, kind): CUTS[name](value)[rank].clone() if name in CUTS and kind != "step" else value
            for (name, kind), value in whole.items()
        }
        shapes = [{name: tuple(own[name, "weight"].shape) for name in group} for group in single.GROUPS]
        with monkeypatch.context() as patched:
            patched.setattr(single, "GROUPS", shapes)
            for name, content in single.files_of(layout, own).items():
                files[name.replace("mp_rank_00", f"mp_rank_{rank:02}")] = content
        files[f"mp_rank_{rank:02}_model_states.pt"] |= {"mp_world_size": 2, "universal_checkpoint_info": info}
    return files


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_put_together_as_the_files_say(
    layout: str, states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DeepSpeedCheckpoint(single.write(tmp_path, cut_files(layout, states, INFO, monkeypatch)))
    assert_same(source, states)
    assert source.optimizer is not None
    assert [list(group["params"]) for group in source.optimizer.groups] == [list(group) for group in single.GROUPS]
    for name in single.TRAINED:
        value = states[name, "weight"]
        sizes = [max(0, size - 1) for size in value.shape]
        part = source.read_box(name, "weight", [int(size > 0) for size in sizes], sizes)
        assert torch.equal(part, value[tuple(slice(int(size > 0), int(size > 0) + size) for size in sizes)])


def test_rows_that_fill_a_vocabulary_up_are_left_out(
    states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = cut_files("stage 1", states, INFO | {"original_vocab_size": 5}, monkeypatch)
    source = DeepSpeedCheckpoint(single.write(tmp_path, files))
    assert torch.equal(source.whole("embedding.weight", "exp_avg"), states["embedding.weight", "exp_avg"][:5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "does not say how its parts fit together"),
        ({"parameter_with_row_parallelism_patterns": []}, r"'down\.weight'.* its parts are \[5, 2\], \[5, 1\]"),
        ({"tp_replicated_parameter_patterns": [r"^tiny$", r"^up\.bias$"]}, r"'up\.bias'.*is said to be whole"),
        ({"parameter_to_average_patterns": ["tiny"]}, "'tiny'.* not known here"),
        ({"autotp_unsupported_parameter_patterns": ["^up"]}, r"'up\.weight'.* not known here"),
        ({"parameter_with_row_parallelism_patterns": [r"^down", "^up"]}, r"'up\.weight'.* not known here"),
        ({"affine_map": {"version": 1, "params": {r"^up\.bias$": {}}}}, r"'up\.bias'.* only an affine map"),
        ({"sub_param_shard_widths": {r"^up\.weight$": [[1, 1], [0, 1]]}}, r"'up\.weight'.* ranks have \[2, 1\]"),
        ({"sub_param_shard_widths": None}, r"'up\.weight'.* are not cut evenly"),
        ({"original_vocab_size": 8}, r"'embedding\.weight'.* 8 are said to be the vocabulary"),
        ({"vocabulary_parameter_patterns": ["(a+)+$"]}, "a pattern of names that is not tried"),
        ({"vocabulary_parameter_patterns": ["["]}, "a pattern of names that is none"),
        ({"parameter_with_sub_params": [5]}, "a form that is not known"),
    ],
)  # fmt: skip
def test_what_the_files_do_not_say_is_refused_by_name(
    change: Any, words: str, states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = None if change is None else INFO | change
    with pytest.raises(BadInput, match=words) as caught:
        DeepSpeedCheckpoint(single.write(tmp_path, cut_files("stage 1", states, info, monkeypatch)))
    assert "none, '['" in str(caught.value) or "ds_to_universal" in str(caught.value)


@pytest.mark.parametrize("layout", ["stage 3", "stage 0"])
def test_stages_that_do_not_say_enough_are_refused(
    layout: str, states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = single.files_of(layout, states)
    for content in files.values():
        content |= {"mp_world_size": 2, "universal_checkpoint_info": INFO} if "module" in content else {}
    with pytest.raises(BadInput, match="ds_to_universal"):
        DeepSpeedCheckpoint(single.write(tmp_path, files))


def test_a_rank_that_is_missing_is_named(states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("mp_rank_01_model_states.pt", "zero_pp_rank_2_mp_rank_01_optim_states.pt")):
        files = cut_files("stage 1", states, INFO, monkeypatch)
        del files[name]
        with pytest.raises(Damaged, match=name):
            DeepSpeedCheckpoint(single.write(tmp_path / str(number), files))


@pytest.mark.parametrize("folder", ["mp_rank_00", "iter_0000100/mp_rank_01"])
def test_megatrons_own_folders_are_refused_by_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "model_optim_rng.pt").touch()
    with pytest.raises(BadInput, match=r"is of Megatron-LM's format 'torch'.* save the state dict of the whole model"):
        open_foreign(tmp_path)
