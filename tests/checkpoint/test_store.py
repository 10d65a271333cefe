"""Folders of checkpoints: only complete ones are seen, the newest is found by looking, old ones go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from terrazzo.checkpoint import SafetensorsWeights, complete_checkpoints, latest, prune, step_folder
from terrazzo.checkpoint.manifest import MANIFEST, read_manifest
from terrazzo.checkpoint.rng import capture_rng, restore_rng
from terrazzo.checkpoint.store import commit, prepare
from terrazzo.errors import BadInput

MINIMAL: dict[str, Any] = {
    "format": "terrazzo",
    "version": 1,
    "step": 3,
    "world_size": 1,
    "plan": "zero3",
    "files": ["rank-00000.safetensors"],
    "entries": {"w": {"shape": [4], "states": {"weight": {"dtype": "float32", "ranges": [[0, 4, 0]]}}}},
    "optimizer": None,
    "ranks": [{}],
    "extra": {},
}


def complete(folder: Path, step: int) -> Path:
    path = step_folder(folder, step)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("{}")
    return path


def test_the_newest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    for step in (9, 100_000_000, 20):
        complete(tmp_path, step)
    step_folder(tmp_path, 30).mkdir()  # no manifest: not complete
    (tmp_path / ".step-00000040.partial").mkdir()
    (tmp_path / "notes.txt").touch()
    steps = [int(path.name[5:]) for path in complete_checkpoints(tmp_path)]
    assert steps == [9, 20, 100_000_000]
    assert latest(tmp_path) == step_folder(tmp_path, 100_000_000)


def test_pruning_keeps_the_newest_and_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        complete(tmp_path, step)
    (tmp_path / "mine").mkdir()
    prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-00000002", "step-00000003"]


def test_a_folder_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    path = step_folder(tmp_path, 5)
    partial = prepare(path)
    (partial / MANIFEST).write_text("{}")
    assert latest(tmp_path) is None
    commit(partial, path)
    assert latest(tmp_path) == path
    assert not partial.exists()


def test_preparing_again_starts_from_nothing(tmp_path: Path) -> None:
    path = step_folder(tmp_path, 5)
    (prepare(path) / "left over by a killed run").touch()
    assert list(prepare(path).iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"files": ["../rank-00000.safetensors"]}, "damaged at files"),
        ({"files": ["/etc/passwd"]}, "damaged at files"),
        ({"world_size": 0}, "damaged at world_size"),
        ({"surprise": 1}, "damaged at surprise"),
        ({"step": -1}, "damaged at step"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(MINIMAL | change))
    with pytest.raises(BadInput, match=words):
        read_manifest(tmp_path)


@pytest.mark.parametrize("ranges", [[[1, 4, 0]], [[0, 2, 0], [3, 4, 0]], [[0, 3, 0], [2, 4, 0]], [[0, 4, 7]]])
def test_ranges_with_gaps_overlaps_or_unknown_files_are_refused(tmp_path: Path, ranges: list[list[int]]) -> None:
    entries = {"w": {"shape": [4], "states": {"weight": {"dtype": "float32", "ranges": ranges}}}}
    (tmp_path / MANIFEST).write_text(json.dumps(MINIMAL | {"entries": entries}))
    with pytest.raises(BadInput, match="w, weight"):
        read_manifest(tmp_path)


def test_a_sound_manifest_is_read_and_an_absent_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a complete checkpoint"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(MINIMAL))
    assert read_manifest(tmp_path).entries["w"].shape == [4]


def test_random_generators_continue_where_they_were() -> None:
    import random

    import numpy as np

    random.gauss(0, 1)  # leaves a second value cached
    state = json.loads(json.dumps(capture_rng()))
    drawn = (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    torch.rand(7), random.random(), np.random.random()
    restore_rng(state)
    assert drawn == (random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())


def test_weights_are_a_mapping_over_all_files_of_a_folder(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2, 2)}, tmp_path / "model-2.safetensors")
    weights = SafetensorsWeights(tmp_path)
    assert sorted(weights) == ["a", "b"]
    assert torch.equal(weights["a"], torch.arange(3.0))
    assert "c" not in weights
    assert list(SafetensorsWeights(tmp_path / "model-2.safetensors")) == ["b"]


def test_weights_that_are_not_there_or_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no \.safetensors"):
        SafetensorsWeights(tmp_path)
    with pytest.raises(BadInput, match="no weights file"):
        SafetensorsWeights(tmp_path / "absent.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"not weights")
    with pytest.raises(BadInput, match="not a readable safetensors file"):
        SafetensorsWeights(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(BadInput, match="both"):
        SafetensorsWeights(tmp_path)
