"""Fine-tuning on conversations against plain PyTorch and transformers: two ranks and accumulation, one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.planner.model.loading import model_shape
from terrazzo.train.checkpoints.export import describe_model
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.lora import add_adapters, with_adapters
from terrazzo.train.preflight import check
from terrazzo.train.session.build_session import open_session
from tests.engine.four_bits import rounded
from tests.helpers.chat import CHATML, MARKED, Messages, conversations, save_tokenizer, turns, write_records
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

STEPS, LR = 4, 3e-3


def on_two(pool: Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """On both ranks, with time for the imports of the first call."""
    return pool.run(function, *arguments, timeout_s=150.0)


class NeverStop(StopRequest):
    """Without signal handlers: the ranks of a pool serve other tests too."""

    def __init__(self, after: int | None = None) -> None:
        self.left = after

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        self.left = None if self.left is None else self.left - 1
        return self.left == 0, broken


def train(values: dict[str, Any], stop_after: int | None = None) -> None:
    """One rank of a run; its first rank writes the metrics."""
    session = open_session(config_from_dict(values), Ranks(dist.get_rank(), 2, torch.device("cpu")))
    try:
        TrainingLoop(session, NeverStop(stop_after)).run()
    finally:
        session.loader.close()
        session.close()


def a_model(folder: Path, layers: int = 2) -> Path:
    """A Llama of 9,000 parameters in two layers, with weights, and a tokenizer beside them."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def values_of(folder: Path, source: Path, tokenizer: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": {"kind": "huggingface", "path": str(folder / "model"), "weights": "pretrained"},
        "data": {
            "source": str(source),
            "tokenizer": str(tokenizer),
            "validation_fraction": 0,
            "cache": str(folder / "c"),
        },
        "plan": {"name": "zero2"},
        "batch": {"global_batch": 24, "micro_batch": 3, "sequence_length": 255},
        "optimizer": {"lr": LR, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "train": {"steps": STEPS, "sample_tokens": 0, "clip": 1.0},
        "launch": {"device": "cpu"},
        "log": {"every": 1, "folder": str(folder / "run"), "tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = values[name] | section if name in values else section
    return values


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def labelled(tokenizer: Any, records: list[Messages], length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of each conversation as transformers alone makes them, cut to `length`."""
    examples = []
    for messages in records:
        found = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, mask = (torch.tensor(found[key][:length]) for key in ("input_ids", "assistant_masks"))
        labels = torch.where(mask.bool(), tokens, -100)
        if (labels[1:] != -100).any():
            examples.append((tokens[None], labels))
    return examples


def plain_loss(model: Any, examples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """The mean over all learnt tokens of all conversations, and how many these are."""
    total, count = torch.zeros(()), 0
    for tokens, labels in examples:
        total = total + F.cross_entropy(model(tokens).logits[0, :-1], labels[1:], reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total / count, count


def plain_losses(folder: Path, examples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss, count = plain_loss(model, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, count


def checked_records(folder: Path, length: int, layers: int = 2) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Path]:
    """Examples and the file of conversations, two of them without an answer; the model is beside them."""
    a_model(folder / "model", layers)
    records = [*conversations(24), turns("nobody answers"), turns("hi", system="nor here")]
    save_tokenizer(folder / "tokenizer", CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    return labelled(tokenizer, records, length + 1), write_records(folder / "chat.jsonl", records)


@pytest.mark.parametrize(
    ("template", "length", "plan"),
    [pytest.param(MARKED, 255, "zero2", marks=pytest.mark.long), (CHATML, 60, "zero3")],
)
def test_two_ranks_and_accumulation_are_one_process(
    two_processes: Pool, tmp_path: Path, template: str, length: int, plan: str
) -> None:
    examples, source = checked_records(tmp_path, length)
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template)
    batch = {"global_batch": len(examples), "sequence_length": length}
    assert len(examples) == 24
    on_two(two_processes, train, values_of(tmp_path, source, tokenizer, batch=batch, plan={"name": plan}))
    found = metrics(tmp_path, "train")
    expected, count = plain_losses(tmp_path, examples)
    assert [line["loss"] for line in found] == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0]
    assert [line["tokens"] for line in found] == [count * (step + 1) for step in range(STEPS)]
    summary = metrics(tmp_path, "summary")[0]
    assert summary["learnt_share"] == pytest.approx(count / (24 * length))
    pace = found[-1]["tokens_per_s"] * found[-1]["step_s"]
    assert pace == pytest.approx(count)


def test_packed_conversations_resume_exactly_and_are_validated_with_their_masks(
    two_processes: Pool, tmp_path: Path
) -> None:
    examples, source = checked_records(tmp_path, 255)
    settings: dict[str, Any] = {
        "data": {"packing": "whole", "validation_source": str(source)},
        "batch": {"global_batch": 4, "micro_batch": 1},
        "train": {"eval_every": 2, "eval_batches": 100},
        "checkpoint": {"every": 2},
    }
    values = values_of(tmp_path, source, tmp_path / "tokenizer", **settings)
    on_two(two_processes, train, values)
    whole = metrics(tmp_path, "train"), metrics(tmp_path, "validation")
    values["log"]["folder"] = str(tmp_path / "again" / "run")
    on_two(two_processes, train, values, 2)
    assert [line["step"] for line in metrics(tmp_path / "again", "train")] == [1, 2]
    on_two(two_processes, train, values)
    again = metrics(tmp_path / "again", "train"), metrics(tmp_path / "again", "validation")
    exact = ("step", "loss", "grad_norm", "tokens")
    assert [[line[key] for key in exact] for line in again[0]] == [[line[key] for key in exact] for line in whole[0]]
    assert [line["loss"] for line in again[1]] == [line["loss"] for line in whole[1]]

    values["data"]["packing"] = "single"
    values["log"]["folder"] = str(tmp_path / "single" / "run")
    on_two(two_processes, train, values, 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected, _ = plain_loss(model, examples)
    assert metrics(tmp_path / "single", "validation")[0]["loss"] == pytest.approx(expected.item(), rel=1e-6)


def lora_run(values: dict[str, Any], start: Path) -> tuple[list[int], list[float]]:
    """One rank of a run with adapters, whose first values are kept: weights and moments in bytes, and as planned."""
    from terrazzo.engine import engine_of
    from terrazzo.integrations.peft import save_adapter
    from terrazzo.planner.memory.peak import memory_of
    from terrazzo.train.planning.as_setup import setup_of

    config = config_from_dict(values)
    check(config, 2)
    session = open_session(config, Ranks(dist.get_rank(), 2, torch.device("cpu")))
    save_adapter(session.model, start)
    try:
        TrainingLoop(session, NeverStop()).run()
    finally:
        session.loader.close()
        session.close()
    bill = engine_of(session.model).bill
    planned = {term.name: term.value for term in memory_of(setup_of(config, 2)).near_terms}
    return [bill.weight_bytes, bill.moments_bytes], [planned["weights"], planned["moments"]]


def base_of(folder: Path, frozen: str | None) -> Any:
    """The model, with the matrices of its layers as they come back of 4 bits where they are kept so."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers.modules() if frozen else ():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data, frozen)
    return model


WITH_ADAPTERS = [
    ("zero1", {}, None),
    ("zero3", {}, None),
    ("zero2", {"tp": 2}, None),
    ("zero3", {"pp": 2}, None),
    ("zero3", {}, "nf4"),
    ("zero1", {}, "nf4-double"),
    ("zero3", {"cp": 2}, "nf4"),
    ("zero0", {"pp": 2}, "nf4"),
]


@pytest.mark.parametrize(("plan", "mesh", "frozen"), mostly_long(WITH_ADAPTERS, ("zero3", {}, "nf4")), ids=str)
def test_adapters_are_those_of_one_process_with_peft(
    two_processes: Pool, tmp_path: Path, plan: str, mesh: dict[str, int], frozen: str | None
) -> None:
    """Also where the two share matrices, of which an adapter has a part or is whole, sequences or layers; and on a base
    in 4 bits.
    """
    peft = pytest.importorskip("peft")
    length = 256 if "cp" in mesh else 255
    examples, source = checked_records(tmp_path, length, 6 if "pp" in mesh else 2)
    values = values_of(
        tmp_path,
        source,
        tmp_path / "tokenizer",
        plan={"name": plan, "mesh": mesh},
        batch={"sequence_length": length},
        parallel={"tensor": {"sequence": False}},  # of 255 tokens
        lora={"rank": 4, "alpha": 32, "target_modules": ["q_proj", "up_proj"]},
        optimizer={"options": {"eps": 1e-5}},
        checkpoint={"save_format": "hf"},
        train={"activation_checkpointing": "full"},
        precision={"frozen": frozen},
    )
    (fullest, planned), (_, again) = on_two(two_processes, lora_run, values, tmp_path / "start")
    assert mesh or fullest == planned == again
    base = base_of(tmp_path / "model", frozen)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(bool(parameter.any()) for parameter in trained) == len(trained) // 2  # B starts at 0, and A does not
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, eps=1e-5)
    losses = []
    for _ in range(STEPS):
        loss, _ = plain_loss(model, examples)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [line["loss"] for line in metrics(tmp_path, "train")] == pytest.approx(losses, rel=2e-6)
    fresh = base_of(tmp_path / "model", frozen)
    exported = peft.PeftModel.from_pretrained(fresh, tmp_path / "run" / "hf")
    assert exported.peft_config["default"].base_model_name_or_path == str(tmp_path / "model")
    for ours, theirs in zip(exported.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with pytest.raises(BadInput, match=r"run with adapters.*save_format=hf"):
        describe_model(config_from_dict(values))
    summary = metrics(tmp_path, "summary")[0]
    assert summary["state_bytes_measured"] == summary["state_bytes_promised"]
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]


@pytest.mark.parametrize(
    ("lora", "config", "message"),
    [
        ({"rank": 4, "target_modules": ["q_porj"]}, {}, "'q_porj', which no linear.*Did you mean 'q_proj'"),
        ({"rank": 4}, {"quantization_config": {"load_in_4bit": True}}, "quantized already.*unquantized"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    tmp_path: Path, lora: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    _, source = checked_records(tmp_path, 255)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(BadInput, match=message):
        check(config_from_dict(values_of(tmp_path, source, tmp_path / "tokenizer", lora=lora)), 1)


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0}
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("values", [GPT2, QWEN3])
@pytest.mark.parametrize(
    "lora", [{}, {"bias": "lora_only"}, {"bias": "all", "target_modules": ["c_proj", "v_proj", "lm_head"]}]
)
def test_the_planner_knows_the_adapters(tmp_path: Path, values: dict[str, Any], lora: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    (tmp_path / "config.json").write_text(json.dumps(values | {"eos_token_id": 0}))
    model = {"kind": "huggingface", "path": str(tmp_path), "weights": "pretrained"}
    targets = [name for name in lora.get("target_modules", []) if (name == "c_proj") == (values is GPT2)]
    settings = lora | ({"target_modules": targets} if targets else {})
    config = config_from_dict({"model": model, "lora": {"rank": 3, **settings}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft speaks of GPT-2's transposed matrices
        built = add_adapters(build_model(tmp_path, device="meta"), config)
    shape = with_adapters(model_shape(tmp_path), config.lora)
    assert shape.numel == sum(parameter.numel() for parameter in built.parameters())
    assert shape.trainable_numel == sum(p.numel() for p in built.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora": {"rank": 4}}, "set model.kind to 'huggingface' and model.weights to 'pretrained'"),
        ({"lora": {"alpha": 4.0}}, "alpha without lora.rank"),
        ({"lora": {"rank": 4, "target_modules": []}}, "target_modules is empty"),
        ({"lora": {"rank": 4, "target_modules": "q_proj"}}, r"give a list of names, \[\"q_proj\"\]"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"precision": {"frozen": "nf4"}}, "without lora.rank none is: set lora.rank"),
        ({"precision": {"frozen": "nf4", "linears": "fp8-rowwise"}}, "would round again: leave one of them out"),
        ({"precision": {"frozen": "nf5"}}, "precision.frozen"),
    ],
)
def test_settings_of_adapters_that_do_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config_from_dict(values)
