"""`terrazzo train` with matrices that ranks share, alone and with sequences that they share: one run on every mesh."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.data.sequences import SequenceDataset
from terrazzo.train.mesh_picture import mesh_picture
from terrazzo.train.parts import Parts
from terrazzo.train.preflight import check
from tests.helpers.threads import run_in_threads
from tests.train.test_context import apart, begin_alike, check_alike, settings
from tests.train.test_preferences import train

MESHES = {
    "dp4": {},
    "tp4": {"tp": 4},
    "dp2 tp2": {"tp": 2},
    "cp4": {"cp": 4},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "dp2 cp2": {"cp": 2},
}
"""Of four ranks."""


def on_mesh(folder: Path, mesh: dict[str, int], ranks: int = 4, plan: str = "zero3", **more: Any) -> dict[str, Any]:
    """The run of `settings`, which evaluates two sequences, or one for each reader where there are more of these."""
    values = settings(folder, ranks, 1, **more)
    readers = ranks // (mesh.get("tp", 1) * mesh.get("cp", 1))
    values["plan"] = {"name": plan, "mesh": mesh}
    values["train"]["eval_batches"] = max(1, 2 // readers)
    values["log"]["folder"] = str(folder / f"run-{'-'.join(f'{axis}{size}' for axis, size in mesh.items())}-{plan}")
    return values


def run_folder(values: dict[str, Any]) -> Path:
    return Path(values["log"]["folder"])


@pytest.fixture
def read_ids(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[int]]]:
    """Of each rank's datasets the sequences of every batch, in the order in which they are read."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    original = SequenceDataset.batch

    def batch(self: SequenceDataset, indices: np.ndarray) -> Any:
        found[id(self)].append(indices.tolist())
        return original(self, indices)

    monkeypatch.setattr(SequenceDataset, "batch", batch)
    return found


@pytest.mark.parametrize(
    ("mesh", "plan", "attention"),
    [
        ({"tp": 2, "cp": 2}, "zero3", "document"),
        pytest.param({"tp": 2}, "zero2", "sequence", marks=pytest.mark.cover),
        pytest.param({"tp": 4}, "zero0", "sequence", marks=pytest.mark.cover),
    ],
)
def test_every_mesh_trains_alike(tmp_path: Path, mesh: dict[str, int], plan: str, attention: str) -> None:
    values = on_mesh(tmp_path, mesh, plan=plan, data=apart(tmp_path, attention))
    begin_alike(values, attention)
    train(values, 4)
    check_alike(values, attention)


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ({"tp": 3}, {}, r"plan\.mesh: The mesh tp 3 does not make up the 4 ranks.*must be 4"),
        ({"tp": 4}, {"model": {"heads": 2, "kv_heads": 2}}, r"model\.heads 2 do not divide by it.*divides 2"),
        ({"tp": 4}, {"model": {"heads": 12, "kv_heads": 6, "dim": 48}}, r"model\.kv_heads 6 neither divide.*divides 6"),
        ({"tp": 4}, {"model": {"ffn_dim": 3}}, r"model\.ffn_dim 3 has no part for each rank.*at most 3"),
        (
            {"tp": 2, "cp": 2},
            {"model": {"heads": 2, "kv_heads": 2}},
            r"cp 2 × plan\.mesh\.tp 2 .* 2 do not divide by 4",
        ),
        ({"tp": 4, "cp": 2}, {"batch": {"sequence_length": 36}}, r"gives each .* 18 tokens.*Use sequences of 32 or 40"),
        ({"tp": 2}, {"batch": {"global_batch": 3}}, r"\(4 ranks / plan\.mesh\.tp 2\) = 2 sequences at once"),
        ({"cp": 2, "tp": 2}, {"objective": {"name": "dpo"}}, r"'dpo' compares whole texts.*plan\.mesh\.cp=1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(
    tmp_path: Path, mesh: dict[str, int], more: dict[str, Any], message: str
) -> None:
    ranks = max(4, math.prod(mesh.values()))
    values = on_mesh(tmp_path, mesh, ranks, **more)
    values["parallel"]["context"]["mode"] = "ulysses"
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(values), ranks)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"model_type": "gpt2"}, {}, r"no plan of tensor parallelism.*'gpt2'.*plan\.mesh\.tp=1"),
        ({"model_type": "llama", "num_attention_heads": 3}, {}, r"num_attention_heads 3 do not divide by it"),
        ({"model_type": "llama", "vocab_size": 1, "num_attention_heads": 4}, {}, r"vocab_size 1 has no part"),
        ({"model_type": "qwen3_moe"}, {}, r"the style '\w+', which this version does not know.*Take tp 1"),
        ({"model_type": "llama"}, {"objective": "reward"}, r"'reward' puts a score.*model\.kind=decoder"),
        ({"model_type": "llama"}, {"lora": {"rank": 2}}, r"lora\.rank adds adapters.*plan\.mesh\.tp=1"),
    ],
)
def test_a_model_of_transformers_is_checked_by_its_config(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = on_mesh(tmp_path, {"tp": 2}) | more
    values["model"] = {"kind": "huggingface", "path": str(tmp_path), "weights": "pretrained"}
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(values), 4)


def test_lengths_that_do_not_divide_by_tp_stay_whole_where_that_is_asked(tmp_path: Path) -> None:
    values = on_mesh(tmp_path, {"tp": 2}, batch={"sequence_length": 31})
    with pytest.raises(BadInput, match=r"Use sequences of 30 or 32 tokens, or parallel\.tensor\.sequence=false"):
        check(config_from_dict(values), 4)
    values["parallel"]["tensor"] = {"sequence": False}
    check(config_from_dict(values), 4)


def test_a_sum_counts_ranks_that_share_matrices_once() -> None:
    def body(rank: int) -> float:
        return float(Parts(rank // 2, 2, counts=rank % 2 == 0).total(torch.tensor([10.0 ** (rank // 2)])))

    assert run_in_threads(4, body) == [11.0] * 4


def test_the_mesh_is_drawn() -> None:
    assert mesh_picture({"dp_replicate": 2, "dp_shard": 4}) == []
    first, signs = mesh_picture({"dp_shard": 2, "cp": 2, "tp": 2})
    assert first == "[0-1 | 2-3] [4-5 | 6-7]   dp_shard 2 × cp 2 × tp 2"
    assert signs == "each [ ] reads its own sequences, | divides them (cp 2), 0-1 divide matrices (tp 2)"
    first, signs = mesh_picture({"dp_replicate": 2, "dp_shard": 2, "cp": 2})
    assert first.startswith("[0 | 1] [2 | 3] || [4 | 5] [6 | 7]   dp_replicate 2 × ")
    assert signs == "each [ ] reads its own sequences, | divides them (cp 2), || parts copies"
    assert mesh_picture({"dp_shard": 16, "tp": 4})[0].startswith("[0-3] [4-7] ... [60-63]   ")
    assert mesh_picture({"dp_replicate": 16, "dp_shard": 1, "tp": 2})[0].startswith("[0-1] [2-3] ... [30-31]   ")
