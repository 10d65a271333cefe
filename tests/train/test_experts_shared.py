"""`terrazzo train` with experts, whole on each rank and shared along ep: one run on every mesh."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.planner.report.words import count_text, setup_text
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.model.decoder import Decoder
from terrazzo.train.model.experts import routers_of
from terrazzo.train.model.prepare import ModelOnPaper, prepare_model
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight import check
from terrazzo.train.preflight.shared_axes import check_axes
from terrazzo.train.report.mesh_picture import mesh_picture
from terrazzo.train.report.summary import summary_lines
from terrazzo.train.session.session import Session
from terrazzo.train.steps.step import backward_on
from tests.helpers.chat import turns, write_records
from tests.helpers.cover import mostly_long
from tests.train.test_preferences import lines, train
from tests.train.test_run_edges import on_ranks_of_a_run
from tests.train.test_tensor import on_mesh, run_folder

EXPERTS = {"count": 4, "top_k": 2, "ffn_dim": 16, "shared": 1}


def settings(folder: Path, mesh: dict[str, int], ranks: int, plan: str = "zero3", **experts: Any) -> dict[str, Any]:
    values = on_mesh(folder, mesh, ranks, plan)
    values["train"]["sample_tokens"] = 0
    values["model"] = values["model"] | {"experts": EXPERTS | experts}
    return values


def measured(values: dict[str, Any]) -> torch.Tensor:
    """Of each step the loss, the gradients' norm, and what is said of experts."""
    names = ("loss", "grad_norm", "tokens", "expert_imbalance", "router_entropy")
    return torch.tensor([[line[name] for name in names] for line in lines(run_folder(values), "train")])


@pytest.mark.parametrize(
    ("mesh", "experts"),
    [
        pytest.param({"ep": 2}, {}, marks=pytest.mark.long),
        ({"ep": 2}, {"balance": "loss", "loss_weight": 0.5, "z_loss": 0.1}),
        ({"ep": 2, "tp": 2}, {}),
    ],
    ids=["bias", "loss", "tp"],
)
def test_ranks_that_share_experts_train_as_ranks_that_have_them_all_and_take_up_their_run(
    tmp_path: Path, mesh: dict[str, int], experts: dict[str, Any]
) -> None:
    whole, shared = (settings(tmp_path, each, 2, **experts) for each in ({}, mesh))
    check(config_from_dict(shared), 2)
    train(whole)
    first = "checkpoints/step-00000001"  # threads draw from one random generator
    shutil.copytree(run_folder(whole) / first, run_folder(shared) / first)
    train(shared)
    torch.testing.assert_close(measured(shared), measured(whole)[1:], rtol=1e-5, atol=0)
    ours, theirs = ([line["loss"] for line in lines(run_folder(each), "validation")] for each in (shared, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert lines(run_folder(shared), "experts") == lines(run_folder(whole), "experts")[1:]
    for line in lines(run_folder(shared), "experts"):
        for name in ("blocks.0.feed_forward.router", "blocks.1.feed_forward.router"):
            assert sum(line[name]) == 4 * 32 * 2  # sequences, tokens of each, experts of each of these
    (summary,) = lines(run_folder(shared), "summary")
    for kind in ("state_bytes", "transient_bytes", "traffic_bytes"):
        assert summary[f"{kind}_promised"] == summary[f"{kind}_measured"]


@pytest.mark.parametrize(
    ("mesh", "balance"),
    mostly_long(
        [({"tp": 2, "cp": 2}, "bias"), ({"pp": 2}, "loss"), ({"cp": 2}, "bias"), ({"ep": 2}, "loss")],
        ({"tp": 2, "cp": 2}, "bias"),
    ),
)
def test_the_length_of_padding_changes_nothing(tmp_path: Path, mesh: dict[str, int], balance: str) -> None:
    """Short texts, each in a row of its own, also beside rows that only fill up a batch.

    The loss is of what a rank has of a micro-batch, and so another one where ranks share sequences.
    """
    texts = [{"text": "ab" * (3 + number % 9)} for number in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    balanced = {"balance": balance, "z_loss": 0.1} | ({"loss_weight": 0.5} if balance == "loss" else {})
    ranks = max(2, math.prod(mesh.values()) // mesh.get("ep", 1))
    narrow, wide = (settings(tmp_path, each, ranks, "zero3", **balanced) for each in ({}, mesh))
    for values, length in ((narrow, 24), (wide, 48)):
        values["data"] = {"source": str(tmp_path / "texts.jsonl"), "packing": "single", "cache": str(tmp_path)}
        values["batch"] |= {"sequence_length": length, "global_batch": 3}
        values["checkpoint"]["allow_changed_data"] = True
    check(config_from_dict(wide), ranks)
    train(narrow, 1)
    first = "checkpoints/step-00000001"
    shutil.copytree(run_folder(narrow) / first, run_folder(wide) / first)
    train(wide, ranks)
    torch.testing.assert_close(measured(wide), measured(narrow)[1:], rtol=1e-5, atol=0)
    assert lines(run_folder(wide), "experts") == lines(run_folder(narrow), "experts")[1:]


@pytest.mark.parametrize(
    ("checkpointing", "tp"),
    mostly_long([("none", 1), ("selective", 1), ("full", 1), ("full", 2)], ("full", 2)),
)
def test_what_rows_send_is_as_planned_where_all_experts_are_as_busy(
    tmp_path: Path, checkpointing: str, tp: int
) -> None:
    """Each token meets all of them."""
    values = settings(tmp_path, {"ep": 2, "tp": tp}, 2, top_k=4)
    values["train"] |= {"steps": 1, "activation_checkpointing": checkpointing}
    train(values)
    (summary,) = lines(run_folder(values), "summary")
    assert summary["routed_bytes_if_even"] == summary["routed_bytes_measured"] > 0
    (line,) = (each for each in summary_lines(summary) if "experts of other ranks" in each)
    assert line.startswith("to experts of other ranks and back per step: 0.")


def test_auxiliary_losses_are_learnt_and_no_part_of_the_loss_that_is_reported(tmp_path: Path) -> None:
    """The same weights give the same loss; another gradient."""
    found = []
    for number, experts in enumerate(({"balance": "none"}, {"balance": "loss", "loss_weight": 5.0})):
        values = settings(tmp_path, {}, 1, **experts)
        values["log"]["folder"] = str(tmp_path / str(number))
        values["train"]["steps"] = 1
        train(values, 1)
        found.append(measured(values)[0])
    assert found[0][0] == found[1][0]
    assert abs(found[0][1] - found[1][1]) > 1e-3


def _weighed(model: Decoder, batches: Iterable[Batch], balance: float, z_loss: float) -> float:
    """The gradients' norm in plain PyTorch: the mean loss of what is learnt, and a mean over what routers have seen."""
    learnt = seen = 0
    loss = aside = torch.zeros(())
    scores: list[torch.Tensor] = []
    for _, router in routers_of(model):
        router.register_forward_hook(lambda module, args, _: scores.append(args[0] @ module.weight.T))
    for batch in batches:
        scores.clear()
        fill = torch.zeros_like(batch.inputs, dtype=torch.bool) if batch.padding_mask is None else batch.padding_mask
        logits = model(batch.inputs, padding_mask=fill)
        loss = loss + F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        learnt, seen = learnt + int((batch.targets != IGNORED).sum()), seen + int((~fill).sum())
        for each in scores:
            tokens = each[~fill.flatten()]
            rows = torch.stack([(tokens.topk(2).indices == expert).sum() for expert in range(4)]) / (2 * len(tokens))
            aside = aside + balance * 4 * (rows * tokens.softmax(-1).sum(0)).sum()
            aside = aside + z_loss * tokens.logsumexp(-1).square().sum()
    assert learnt < seen / 8
    (loss / learnt + aside / seen).backward()
    return float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())


def test_auxiliary_losses_weigh_the_same_however_few_tokens_are_learnt(tmp_path: Path) -> None:
    """Answers of a letter behind long prompts, and rows of different lengths; on two ranks, two micro-batches each."""
    values = settings(tmp_path, {"dp_replicate": 2}, 2, "zero0", balance="loss", loss_weight=2.0, z_loss=0.5)
    prompts = ["what is after " * (1 + n % 3) for n in range(12)]
    records = [{"messages": turns(prompt, "n" * (1 + n % 2))} for n, prompt in enumerate(prompts)]
    write_records(tmp_path / "chat.jsonl", records)
    values["data"] = {"source": str(tmp_path / "chat.jsonl"), "validation_fraction": 0, "cache": str(tmp_path)}
    values["data"]["packing"] = "single"
    values["batch"] |= {"sequence_length": 80}

    def step(session: Session) -> tuple[tuple[Batch, ...], Decoder, float]:
        assert isinstance(session.model, Decoder)
        plain = Decoder(session.model.config)
        plain.load_state_dict(session.model.state_dict())
        batch = session.loader.next_step()
        return batch.micro_batches, plain, float(backward_on(session, batch)[1])

    found = on_ranks_of_a_run(2, config_from_dict(values), step)
    (_, plain, norm) = found[0]
    assert norm == pytest.approx(_weighed(plain, [each for own, *_ in found for each in own], 2.0, 0.5), rel=1e-4)


@pytest.mark.parametrize("shared", [0, 2])
def test_the_planner_knows_each_parameter_of_a_decoder_with_experts(tmp_path: Path, shared: int) -> None:
    config = config_from_dict(settings(tmp_path, {}, 1, shared=shared) | {"launch": {"device": "cpu"}})
    model = prepare_model(config)
    assert isinstance(model, Decoder)
    shape = setup_of(config, 1).model
    planned = {f"{unit.name}.{each.name}".lstrip("."): each.shape for unit in shape.units for each in unit.tensors}
    there = {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert planned == {name: each for name, each in there.items() if "blocks.1." not in name}  # all blocks are alike
    assert shape.numel == sum(math.prod(each) for each in there.values())
    routed = sum(math.prod(each) for name, each in there.items() if ".experts." in name)
    assert shape.active_numel == shape.numel - routed + routed * 2 // 4
    assert f"parameters, {count_text(shape.active_numel)} active" in setup_text(setup_of(config, 1))


@pytest.mark.parametrize(
    ("mesh", "experts", "message"),
    [
        ({"ep": 3}, {}, r"plan\.mesh: The mesh has ep 3, which does not divide the 4 ranks"),
        ({"ep": 4}, {"count": 6}, r"model\.experts\.count 6 does not divide by it.*divides 6"),
        ({"ep": 2}, None, r"plan\.mesh\.ep is 2, and the model has no experts.*Set model\.experts\.count, or plan"),
        ({"ep": 2, "dp_replicate": 4}, {}, r"ep 2, which does not divide the 1 ranks"),
        ({}, {"top_k": 5}, r"top_k 5 experts compute each token, and there are 4"),
        ({}, {"count": None}, r"top_k.* without model\.experts\.count|ffn_dim.* without model\.experts\.count"),
        ({}, {"loss_weight": 0.1}, r"loss_weight belongs to balance 'loss', and this one is 'bias'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(
    tmp_path: Path, mesh: dict[str, int], experts: dict[str, Any] | None, message: str
) -> None:
    values = settings(tmp_path, mesh, max(4, math.prod(mesh.values()) // mesh.get("ep", 1)), **experts or {})
    if experts is None:
        del values["model"]["experts"]
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(values), 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"checkpoint": {"save_format": "hf"}}, r"a Llama, which has no experts"),
        ({"objective": {"name": "dpo"}}, r"'dpo' has not been tried with experts"),
        ({"model": {"kind": "huggingface", "path": "x", "experts": EXPERTS}}, r"experts belong to kind 'decoder'"),
    ],
)
def test_what_experts_cannot_be_beside_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config_from_dict(settings(tmp_path, {}, 2) | more)


def test_experts_of_tokens_that_ranks_along_tp_share_are_refused_of_transformers_too(tmp_path: Path) -> None:
    """Where they are exchanged: of others each rank's own have the same gradient, which counts once."""
    model = {"kind": "huggingface", "path": str(tmp_path)}
    apart = {"model": model, "parallel": {"tensor": {"sequence": False}}}
    config_from_dict(apart | {"plan": {"mesh": {"tp": 2}}})
    config_from_dict({"model": model, "plan": {"mesh": {"tp": 2, "ep": 2}}})
    with pytest.raises(BadInput, match=r"would all give experts the same tokens: .*parallel\.tensor\.sequence=true"):
        config_from_dict(apart | {"plan": {"mesh": {"tp": 2, "ep": 2}}})


def test_the_picture_says_who_divides_experts() -> None:
    picture, signs = mesh_picture({"dp_shard": 4, "ep": 2})
    assert picture == "[0] [1] [2] [3]   dp_shard 4"
    assert signs.endswith("each 2 neighbours divide experts (ep 2)")


QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def of_transformers(folder: Path, mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    values = settings(folder, mesh, 2) | {"model": {"kind": "huggingface", "path": str(folder)}}
    values["train"] |= {"steps": 2}
    return values


MIXTRAL = QWEN | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
QWEN_2 = QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}


@pytest.mark.parametrize(
    ("config", "mesh"),
    mostly_long([(QWEN, {"ep": 2}), (MIXTRAL, {"tp": 2}), (QWEN_2, {"tp": 2, "ep": 2})], (QWEN_2, {"tp": 2, "ep": 2})),
    ids=["ep", "tp", "tp and ep"],
)
def test_so_do_models_of_transformers(tmp_path: Path, config: dict[str, Any], mesh: dict[str, int]) -> None:
    """Beside tp experts and routers are whole, and each rank computes its part of the sequences."""
    pytest.importorskip("transformers")
    whole, shared = (of_transformers(tmp_path, each, **config) for each in ({}, mesh))
    check(config_from_dict(shared), 2)
    train(whole)
    first = "checkpoints/step-00000001"
    shutil.copytree(run_folder(whole) / first, run_folder(shared) / first)
    train(shared)
    names = ("loss", "grad_norm", "tokens", "expert_imbalance", "router_entropy")
    (found,), (_, expected) = (
        [[line[name] for name in names] for line in lines(run_folder(each), "train")] for each in (shared, whole)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    (line,) = lines(run_folder(shared), "experts")
    assert line == lines(run_folder(whole), "experts")[1]
    assert [sum(line[f"model.layers.{layer}.mlp.experts"]) for layer in (0, 1)] == [
        4 * 32 * config["num_experts_per_tok"]
    ] * 2
    (summary,) = lines(run_folder(shared), "summary")
    for kind in ("state_bytes", "transient_bytes", "traffic_bytes"):
        assert summary[f"{kind}_promised"] == summary[f"{kind}_measured"]
    assert (summary.get("routed_bytes_measured", 0) > 0) is ("ep" in mesh)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_a_pretrained_folder_begins_a_run_and_another_ends_it(tmp_path: Path, config: dict[str, Any]) -> None:
    """Against transformers' own weights, that no step has changed, and its own loader."""
    transformers = pytest.importorskip("transformers")
    values = of_transformers(tmp_path, {"ep": 2}, **config)
    pretrained = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    pretrained.save_pretrained(tmp_path)
    values["model"]["weights"] = "pretrained"
    values["optimizer"] = {"name": "SGD", "lr": 0.0}
    values |= {"checkpoint": {"save_format": "hf"}}
    values["train"] |= {"steps": 1}
    check(config_from_dict(values), 2)
    train(values)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        run_folder(values) / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    found, expected = again.state_dict(), pretrained.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    names = [
        {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        for folder in (tmp_path, run_folder(values) / "hf")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"num_experts": 3}, {}, r"plan\.mesh\.ep 2: .*gate_up_proj' has 3 experts, of which 2 ranks"),
        ({"mlp_only_layers": [0, 1]}, {}, r"plan\.mesh\.ep 2: .*Qwen3MoeForCausalLM has no module of experts"),
        ({}, {"objective": {"name": "dpo"}}, r"objective 'dpo' has not been tried with experts"),
    ],
)
def test_experts_of_transformers_that_ranks_cannot_share_are_refused_before_work_starts(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    values = of_transformers(tmp_path, {"ep": 2}, **changes) | more
    with pytest.raises(BadInput, match=message):
        check_axes(config := config_from_dict(values), ModelOnPaper(config))
