"""`terrazzo train` with matrices that ranks share, alone and with sequences that they share: one run on every mesh."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

import terrazzo as tz
from terrazzo.config import config_from_dict, load_config
from terrazzo.errors import BadInput
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.parallel import VocabularyLoss
from terrazzo.train.data.sequences import SequenceDataset
from terrazzo.train.preflight import check
from terrazzo.train.report.mesh_picture import mesh_picture
from terrazzo.train.session.build_session import open_session
from terrazzo.train.session.data_share import DataShare
from tests.checkpoint.documented import read_as_documented
from tests.helpers import programs
from tests.helpers.threads import run_in_threads
from tests.test_commands import ROOT
from tests.train.test_context import apart, begin_alike, check_alike, said, settings
from tests.train.test_loop import environment
from tests.train.test_preferences import lines, train

MESHES = {
    "dp4": {},
    "tp4": {"tp": 4},
    "dp2 tp2": {"tp": 2},
    "cp4": {"cp": 4},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "dp2 cp2": {"cp": 2},
    "rep2 dp2 tp2": {"dp_replicate": 2, "tp": 2},
    "rep2 cp4": {"dp_replicate": 2, "cp": 4},
    "tp4 cp2": {"tp": 4, "cp": 2},
    "dp2 tp2 cp2": {"tp": 2, "cp": 2},
}
"""Of four ranks; of eight those in `OF_EIGHT`."""

OF_EIGHT = ("rep2 dp2 tp2", "rep2 cp4", "tp4 cp2", "dp2 tp2 cp2")


def ranks_of(name: str) -> int:
    return 8 if name in OF_EIGHT else 4


def plan_of(name: str) -> str:
    return "hybrid_shard" if "dp_replicate" in MESHES[name] else "zero3"


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
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[SequenceDataset, list[list[int]]]]:
    """Of each rank's datasets the sequences of every batch, in the order in which they are read."""
    found: dict[int, tuple[SequenceDataset, list[list[int]]]] = {}
    original = SequenceDataset.batch

    def batch(self: SequenceDataset, indices: np.ndarray[Any, Any]) -> Any:
        found.setdefault(id(self), (self, []))[1].append(indices.tolist())
        return original(self, indices)

    monkeypatch.setattr(SequenceDataset, "batch", batch)
    return found


def check_order(reads: dict[int, tuple[SequenceDataset, list[list[int]]]], ranks: int, readers: int) -> None:
    """Ranks that share matrices or sequences read the same ones; all readers together those of each step, 2 to 4."""
    numel = max(len(dataset) for dataset, _ in reads.values())
    per_step = 4 // readers  # of one sequence each
    training = [batches[: 3 * per_step] for dataset, batches in reads.values() if len(dataset) == numel]
    assert len(training) == ranks
    shares = sorted({json.dumps(batches): batches for batches in training}.values())
    assert len(shares) == readers
    assert all(training.count(share) == ranks // readers for share in shares)
    order = np.random.default_rng([0, 0]).permutation(numel)[4:16].reshape(3, 4)
    for step, expected in enumerate(order.tolist()):
        found = [sequence for share in shares for (sequence,) in share[step * per_step :][:per_step]]
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "plan", "attention"),
    [
        ("tp2 cp2", "zero3", "document"),
        pytest.param("dp2 tp2", "zero2", "sequence", marks=pytest.mark.long),
        pytest.param("tp4", "zero0", "sequence", marks=pytest.mark.long),
        pytest.param("dp4", "zero1", "sequence", marks=pytest.mark.long),
        pytest.param("cp4", "zero3", "sequence", marks=pytest.mark.long),
        pytest.param("dp2 cp2", "shard_grad_op", "sequence", marks=pytest.mark.long),
        *(pytest.param(name, plan_of(name), "sequence", marks=pytest.mark.long) for name in OF_EIGHT),
    ],
)
def test_every_mesh_trains_alike(tmp_path: Path, reads: Any, name: str, plan: str, attention: str) -> None:
    """Tokens, losses, norms, validation and sample are those of one rank; so are the sequences of each step."""
    ranks = ranks_of(name)
    values = on_mesh(tmp_path, MESHES[name], ranks, plan, data=apart(tmp_path, attention))
    begin_alike(values, attention)
    reads.clear()
    train(values, ranks)
    readers = ranks // config_from_dict(values).plan.mesh.ranks_per_batch
    check_order(reads, ranks, readers)
    check_alike(values, attention, validated=readers <= 2)


def crossed(folder: Path, first: dict[str, int], then: dict[str, int], ranks: int) -> dict[str, Any]:
    """A run that another mesh ends."""
    values = on_mesh(folder, first, ranks)
    begin_alike(values, "sequence")
    train(values, ranks, stop_after=2)
    ended = on_mesh(folder, then, ranks, plan="zero2") | {"log": values["log"]}
    train(ended, ranks)
    return ended


def test_another_mesh_continues_a_run(tmp_path: Path) -> None:
    check_alike(crossed(tmp_path, {"tp": 2}, {"cp": 2}, 2), "sequence")


def saved_again(values: dict[str, Any], ranks: int, folder: Path) -> None:
    """What a run has once it has resumed."""
    config = config_from_dict(values)

    def body(rank: int) -> None:
        with open_session(config, Ranks(rank, ranks, torch.device("cpu"))) as session:
            tz.checkpoint.save(folder, session.model, session.optimizer, {"step": session.step})

    run_in_threads(ranks, body)


@pytest.mark.long
@pytest.mark.parametrize("first", MESHES)
def test_every_mesh_continues_the_run_of_every_other(tmp_path: Path, first: str) -> None:
    """Weights and moments are the same to the bit on all of them, and the one behind it ends the run."""
    values = on_mesh(tmp_path, MESHES[first], ranks_of(first), plan_of(first))
    begin_alike(values, "sequence")
    train(values, ranks_of(first), stop_after=2)
    expected = read_as_documented(max((run_folder(values) / "checkpoints").glob("step-*")))
    for then, mesh in MESHES.items():
        resumed = on_mesh(tmp_path, mesh, ranks_of(then), plan_of(then)) | {"log": values["log"]}
        saved_again(resumed, ranks_of(then), tmp_path / then)
        found = read_as_documented(tmp_path / then)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected), f"{first} on {then}"
    names = list(MESHES)
    last = names[(names.index(first) + 1) % len(names)]
    ended = on_mesh(tmp_path, MESHES[last], ranks_of(last), plan_of(last)) | {"log": values["log"]}
    train(ended, ranks_of(last))
    check_alike(ended, "sequence", validated=last not in ("dp4", "rep2 dp2 tp2"))


def by_processes(folder: Path, name: str) -> tuple[str, list[float], str]:
    """What is said of a run from its seed on; its last loss, norm and tokens; what it writes at its end."""
    values = on_mesh(folder, MESHES[name], ranks_of(name), plan_of(name))
    config = folder / "config.yaml"
    config.write_text(json.dumps(values))
    done = programs.run("-m", "terrazzo", "train", str(config), env=environment(), timeout_s=170)
    assert done.returncode == 0, done.stderr
    steps, _, text = said(run_folder(values))
    return done.stdout, steps[-1], text


@cache
def without_axes() -> tuple[list[float], str]:
    return by_processes(Path(mkdtemp()), "dp4")[1:]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in MESHES if name != "dp4"])
def test_processes_of_every_mesh_end_alike(tmp_path: Path, name: str) -> None:
    """From one seed: initial weights do not depend on the mesh either. Any two differ by at most 1e-4."""
    shown, last, text = by_processes(tmp_path, name)
    expected, its_text = without_axes()
    assert "mesh      [" in shown
    assert last == pytest.approx(expected, abs=5e-5)
    assert text == its_text


@pytest.mark.parametrize("more", [[], ["model.layers=1", "parallel.context.mode=ulysses"]])
def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    """Also where the only block is no unit of its own: what it sends along cp and tp is promised all the same."""
    monkeypatch.chdir(ROOT)
    source = tmp_path / "text.txt"
    source.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(2000)))
    settings = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", f"data.source={source}"]
    settings += ["train.steps=1", "schedule.warmup_steps=0", "train.eval_every=null", "train.sample_tokens=0", *more]
    config = load_config("examples/tp_cp.yaml", settings)
    check(config, 4)
    train(config.model_dump(mode="json"), 4)
    (summary,) = lines(tmp_path / "run", "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]
    assert summary["peak_memory_bytes_promised"] is not None
    (line,) = lines(tmp_path / "run", "train")
    assert line["tokens"] == 4 * 256


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ({"tp": 3}, {}, r"plan\.mesh: The mesh tp 3 does not make up the 4 ranks.*must be 4.*launch\.ranks=3"),
        ({"tp": 4}, {"model": {"heads": 2, "kv_heads": 2}}, r"model\.heads 2 do not divide by it.*divides 2"),
        ({"tp": 4}, {"model": {"heads": 12, "kv_heads": 6, "dim": 48}}, r"model\.kv_heads 6 neither divide.*divides 6"),
        ({"tp": 4}, {"model": {"ffn_dim": 3}}, r"model\.ffn_dim 3 has no part for each rank.*at most 3"),
        (
            {"tp": 2, "cp": 2},
            {"model": {"heads": 2, "kv_heads": 2}},
            r"cp 2 × plan\.mesh\.tp 2 .* 2 do not divide by 4",
        ),
        ({"tp": 4, "cp": 2}, {"batch": {"sequence_length": 36}}, r"gives each .* 18 tokens.*Use sequences of 32 or 40"),
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


SMALL = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"model_type": "gpt2"}, {}, r"no plan of tensor parallelism.*'gpt2'.*plan\.mesh\.tp=1"),
        ({"model_type": "llama", "num_attention_heads": 3}, {}, r"num_attention_heads 3 do not divide by it"),
        ({"model_type": "llama", "vocab_size": 1, "num_attention_heads": 4}, {}, r"vocab_size 1 has no part"),
        ({"model_type": "deepseek_v2"}, {}, r"the style '\w+', which this version does not know.*Take tp 1"),
        ({"model_type": "llama"}, {"objective": "reward"}, r"'reward' puts a score.*model\.kind=decoder"),
        ({"model_type": "olmo2", **SMALL}, {}, r"plan\.mesh\.tp is 2: .*'model\.layers\.0\..*q_proj' together again"),
        ({"model_type": "olmoe", **SMALL, "num_experts": 2}, {}, r"plan\.mesh\.tp is 2: .*q_proj' together again"),
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


LLAMA = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GLOBS = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn": "enter",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "lm_head": "colwise",
}


def of_transformers(folder: Path, ranks: int, mesh: dict[str, int], plan: Any = "auto") -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    values = on_mesh(folder, mesh, ranks)
    values["parallel"]["tensor"] = {"plan": plan}
    values["model"] = {"kind": "huggingface", "path": str(folder)}
    return values


@pytest.mark.parametrize("plan", ["auto", pytest.param(GLOBS, marks=pytest.mark.long)], ids=["auto", "globs"])
def test_a_model_of_transformers_trains_as_on_one_rank_and_no_rank_has_all_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Any
) -> None:
    pytest.importorskip("transformers")
    widths = set()
    original = VocabularyLoss.__call__

    def seen(self: VocabularyLoss, logits: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.add(logits.shape[-1])
        return original(self, logits, *others)

    monkeypatch.setattr(VocabularyLoss, "__call__", seen)
    one, two = of_transformers(tmp_path, 1, {}), of_transformers(tmp_path, 2, {"tp": 2}, plan)
    train(one, 1)
    first = "checkpoints/step-00000001"  # threads draw from one random generator
    shutil.copytree(run_folder(one) / first, run_folder(two) / first)
    train(two, 2)
    assert widths == {129, 130}
    (steps, validation, text), (expected, valid, its_text) = said(run_folder(two)), said(run_folder(one))
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected[1:]), rtol=2e-5, atol=0)
    assert (validation, text) == (pytest.approx(valid, rel=2e-5), its_text)
    (summary,) = lines(run_folder(two), "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"] or plan != "auto"


@pytest.mark.parametrize(
    ("mesh", "mode", "more"),
    [
        pytest.param({"tp": 2}, "gather", {"lora": {"rank": 2, "target_modules": ["q_proj"]}}, marks=pytest.mark.long),
        ({"tp": 2}, "gather", {"lora": {"rank": 2, "target_modules": ["down_proj"]}}),  # its sum is one more
        pytest.param({"cp": 2}, "ulysses", {"lora": {"rank": 2, "target_modules": ["o_proj"]}}, marks=pytest.mark.long),
        pytest.param({"cp": 2}, "ring", {"lora": {"rank": 2, "target_modules": "all-linear"}}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft, in two threads
def test_what_adapters_send_is_promised_to_the_byte(
    tmp_path: Path, mesh: dict[str, int], mode: str, more: dict[str, Any]
) -> None:
    """Gradients of activations end at the first block with one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    values = of_transformers(tmp_path, 2, mesh) | more
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    values["model"]["weights"] = "pretrained"
    values["parallel"]["context"]["mode"] = mode
    values["train"] |= {"steps": 1, "activation_checkpointing": "full"}
    train(values, 2)
    (summary,) = lines(run_folder(values), "summary")
    promised = summary["traffic_bytes_promised"]
    assert any(name.startswith(tuple(mesh)) for name in promised)
    assert summary["traffic_bytes_measured"] == promised


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"lm_heed": "colwise"}, r"parallel\.tensor\.plan: .*'lm_heed', which matches no module.*you mean 'lm_head'"),
        ({"model.layers.*.self_attn": "enter"}, r"parallel\.tensor\.plan: .*no 'colwise' and 'rowwise' inside"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_before_anything_is_built(
    tmp_path: Path, plan: dict[str, str], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(of_transformers(tmp_path, 2, {"tp": 2}, plan)), 2)


def test_styles_and_key_heads_of_a_plan_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the style 'colwis'\. Did you mean 'colwise'\?"):
        config_from_dict(of_transformers(tmp_path, 2, {"tp": 2}, {"lm_head": "colwis"}))
    with pytest.raises(BadInput, match=r"the 2 key heads do not divide by plan\.mesh\.tp 4.*plan=auto"):
        check(config_from_dict(of_transformers(tmp_path, 4, {"tp": 4}, GLOBS)), 4)


def test_lengths_that_do_not_divide_by_tp_stay_whole_where_that_is_asked(tmp_path: Path) -> None:
    values = on_mesh(tmp_path, {"tp": 2}, batch={"sequence_length": 31})
    with pytest.raises(BadInput, match=r"Use sequences of 30 or 32 tokens, or parallel\.tensor\.sequence=false"):
        check(config_from_dict(values), 4)
    values["parallel"]["tensor"] = {"sequence": False}
    check(config_from_dict(values), 4)


def test_lengths_beside_experts_are_not_told_to_stay_whole(tmp_path: Path) -> None:
    values = on_mesh(tmp_path, {"tp": 2, "ep": 2}, batch={"sequence_length": 31})
    values["model"]["experts"] = {"count": 4, "top_k": 2, "ffn_dim": 16}
    with pytest.raises(BadInput, match=r"Use sequences of 30 or 32 tokens\.$"):
        check(config_from_dict(values), 4)


def test_tp_over_hosts_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_dict(on_mesh(tmp_path, {"tp": 4}))
    assert not any("tp 4" in note for note in check(config, 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (note,) = (note for note in check(config, 4) if "tp 4" in note)
    assert note.startswith("plan: tp 4 is wider than the 2 ranks that reach each other without the network")


def test_a_sum_counts_ranks_that_share_matrices_once() -> None:
    def body(rank: int) -> float:
        return float(DataShare(rank // 2, 2, counts=rank % 2 == 0).total(torch.tensor([10.0 ** (rank // 2)])))

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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft, in threads
def test_what_adapters_in_stages_send_is_not_promised(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    values = of_transformers(tmp_path, 4, {"tp": 2, "pp": 2})
    values |= {"lora": {"rank": 2, "target_modules": ["down_proj"]}}
    transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 4})
    ).save_pretrained(tmp_path)
    values["model"]["weights"] = "pretrained"
    values["train"] |= {"steps": 1}
    train(values, 4)
    (summary,) = lines(run_folder(values), "summary")
    promised, measured = summary["traffic_bytes_promised"], summary["traffic_bytes_measured"]
    assert {name.partition(" ")[0] for name, count in promised.items() if count is None} == {"tp", "send"}
    assert all(measured[name] == count for name, count in promised.items() if count is not None)
    assert all(measured[name] for name, count in promised.items() if count is None)
