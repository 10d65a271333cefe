"""DPO and reward models from preference pairs, against plain PyTorch and transformers: two ranks, one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.config import ObjectiveConfig, config_from_dict, load_config
from terrazzo.config.sections.objective import OBJECTIVES
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.model.loading import model_shape
from terrazzo.train.checkpoints.resume import resume_notes
from terrazzo.train.data import IGNORED, Batch, load_data
from terrazzo.train.loop import TrainingLoop
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.objectives import CLASSES, DPO, objective_of
from terrazzo.train.model.reward import build_reward_model, with_score
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight import check
from terrazzo.train.preflight.idle_keys import idle_notes
from terrazzo.train.session.build_session import open_session
from tests.helpers.chat import CHATML, save_tokenizer, turns, write_records
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads
from tests.train.test_session import StopAfter

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
ROOT = Path(__file__).parents[2]
LR, BETA, STEPS = 3e-3, 0.3, 3
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0}


def llama_config(**values: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, **values,
    )  # fmt: skip


def pairs(count: int = 8) -> list[dict[str, Any]]:
    """Conversations of several lengths, each with a good and a bad answer."""
    found = []
    for n in range(count):
        prompt = turns(*(["hello", "good day"] * (n % 3)), f"what comes after {n}?", system="count" if n % 2 else None)
        good, bad = ({"role": "assistant", "content": text} for text in (f"{n + 1}. " * (1 + n % 2), "who knows? " * 2))
        found.append({"prompt": prompt, "chosen": [good], "rejected": [bad]})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, a scored one, a tokenizer and pairs."""
    root = tmp_path_factory.mktemp("preferences")
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(root / "lm")
    transformers.LlamaForSequenceClassification(llama_config(num_labels=1)).save_pretrained(root / "scored")
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification):
        auto.from_config(llama_config())  # ranks are threads here, and what it imports the first time is no safe place
    save_tokenizer(root / "tokenizer", CHATML)
    write_records(root / "pairs.jsonl", pairs())
    return root


def values_of(folder: Path, out: Path, objective: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    model = "scored" if objective["name"] == "reward" else "lm"
    values: dict[str, Any] = {
        "objective": objective,
        "model": {"kind": "huggingface", "path": str(folder / model), "weights": "pretrained"},
        "data": {"source": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tokenizer")},
        "plan": {"name": "zero3"},
        "batch": {"global_batch": 8, "micro_batch": 2, "sequence_length": 150},
        "optimizer": {"lr": LR, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "train": {"steps": STEPS, "sample_tokens": 0},
        "launch": {"device": "cpu"},
        "log": {"every": 1, "folder": str(out), "tensorboard": False},
    }
    values["data"] |= {"validation_fraction": 0, "cache": str(folder / "cache")}
    return values | {name: values.get(name, {}) | section for name, section in sections.items()}


def train(values: dict[str, Any], ranks: int = 2, stop_after: int | None = None) -> None:
    config = config_from_dict(values)

    def body(rank: int) -> None:
        with open_session(config, Ranks(rank, ranks, torch.device("cpu"))) as session:
            trainer = TrainingLoop(session, StopAfter(stop_after))
            trainer.run()

    run_in_threads(ranks, body)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out, "train")]


def tokens_of(folder: Path) -> list[tuple[Tensor, Tensor, int]]:
    """The chosen and the rejected conversation of each pair as transformers renders them, and the prompt's length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")

    def rendered(messages: Any, prompt: bool = False) -> Tensor:
        return torch.tensor(
            tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=prompt)
        )

    return [
        (
            *(rendered(pair["prompt"] + pair[side]) for side in ("chosen", "rejected")),
            len(rendered(pair["prompt"], True)),
        )
        for pair in pairs()
    ]


def log_prob(model: Any, tokens: Tensor, given: int) -> Tensor:
    """Of what follows the first `given` tokens."""
    found = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])
    return found[given - 1 :].sum()


def plain_dpo(folder: Path, smoothing: float = 0.0) -> list[float]:
    """Equation 7 of the paper, with a copy of the model as its reference."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, reference = load(folder / "lm"), load(folder / "lm")

    def loss_of(chosen: Tensor, rejected: Tensor, given: int) -> Tensor:
        with torch.no_grad():
            before = log_prob(reference, chosen, given) - log_prob(reference, rejected, given)
        margin = BETA * (log_prob(model, chosen, given) - log_prob(model, rejected, given) - before)
        return -(1 - smoothing) * torch.sigmoid(margin).log() - smoothing * torch.sigmoid(-margin).log()

    return descended(model, folder, loss_of)


def plain_reward(folder: Path) -> list[float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scored")

    def loss_of(chosen: Tensor, rejected: Tensor, given: int) -> Tensor:
        return -torch.sigmoid(model(chosen[None]).logits - model(rejected[None]).logits).log().squeeze()

    return descended(model, folder, loss_of)


def descended(model: Any, folder: Path, loss_of: Any) -> list[float]:
    """The losses of `STEPS` steps over all pairs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        loss = torch.stack([loss_of(*pair) for pair in tokens_of(folder)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("plan", "tp"), mostly_long([("zero2", 1), ("zero3@cpu", 1), ("zero2", 2)], ("zero2", 2)))
def test_dpo_on_two_ranks_is_the_paper_on_one(folder: Path, tmp_path: Path, plan: str, tp: int) -> None:
    """Also where the two share matrices: the model's own plan of `transformers`, with one key head for both."""
    objective = {"name": "dpo", "beta": BETA, "label_smoothing": 0.1 if plan == "zero2" else 0.0}
    values = values_of(folder, tmp_path, objective, plan={"name": plan, "mesh": {"tp": tp}})
    train(values)
    expected = plain_dpo(folder, objective["label_smoothing"])
    assert losses(tmp_path) == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0]
    given = lines(tmp_path, "train")[-1]["tokens"]
    assert given == STEPS * sum(len(one) + len(other) - 2 * prompt for one, other, prompt in tokens_of(folder))
    assert_the_bill_is_kept(tmp_path)


def test_a_reward_model_on_two_ranks_is_that_of_transformers_on_one(folder: Path, tmp_path: Path) -> None:
    train(values_of(folder, tmp_path, {"name": "reward"}, checkpoint={"save_format": "hf"}))
    expected = plain_reward(folder)
    assert losses(tmp_path) == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0]
    assert_the_bill_is_kept(tmp_path)
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert type(exported) is transformers.LlamaForSequenceClassification
    scores = [[exported(text[None]).logits.item() for text in pair[:2]] for pair in tokens_of(folder)]
    assert sum(chosen > rejected for chosen, rejected in scores) > len(scores) / 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_the_losses_are_those_of_trl(folder: Path, tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("trl")
    import datasets

    train(values_of(folder, tmp_path / "ours", {"name": name, **({"beta": BETA} if name == "dpo" else {})}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer", pad_token="<|im_start|>")
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path), "learning_rate": LR, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "per_device_train_batch_size": 8, "logging_steps": 1, "use_cpu": True, "report_to": [], "bf16": False,
        "gradient_checkpointing": False, "max_length": None,
    }  # fmt: skip
    data = datasets.Dataset.from_list(pairs())
    if name == "dpo":
        load = transformers.AutoModelForCausalLM.from_pretrained
        trainer = trl.DPOTrainer(
            load(folder / "lm"), load(folder / "lm"), trl.DPOConfig(beta=BETA, **settings),
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip
    else:
        scored = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "scored")
        scored.config.pad_token_id = tokenizer.pad_token_id
        trainer = trl.RewardTrainer(
            scored, trl.RewardConfig(**settings), train_dataset=data, processing_class=tokenizer
        )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses(tmp_path / "ours") == pytest.approx(theirs, rel=1e-5)


def test_adapters_are_compared_with_their_base(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    train(values_of(folder, tmp_path, {"name": "dpo"}, lora={"rank": 2, "target_modules": ["q_proj"]}))
    found = losses(tmp_path)
    assert found[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[-1] < found[0]
    assert_the_bill_is_kept(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "llama"])
def test_dpo_drops_nothing(tmp_path: Path, model_type: str) -> None:
    """Falcon reads its config in every forward, OPT has a number in each layer, GPT-2 modules; both by default."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    more = {"opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "layerdrop": 0.5}, "falcon": {"hidden_dropout": 0.5}}
    config = GPT2 if model_type == "gpt2" else sizes | {"attention_dropout": 0.5} | more.get(model_type, {})
    tokens, equal = torch.arange(10)[None], {}
    for dropout in (True, False):
        model = build_model({"model_type": model_type} | config, device="cpu", dropout=dropout).train()
        equal[dropout] = torch.equal(model(tokens).logits, model(tokens).logits)
    assert equal == {True: False, False: True}


def test_dpo_begins_at_ln_2_whatever_is_dropped(folder: Path, tmp_path: Path) -> None:
    values = values_of(folder, tmp_path, {"name": "dpo"}, train={"steps": 1})
    train(values | {"model": {"dim": 16, "layers": 2, "heads": 2, "dropout": 0.5}}, ranks=1)
    assert losses(tmp_path) == pytest.approx([math.log(2)], rel=1e-6)
    given = config_from_dict({"objective": "dpo", "model": {"dropout": 0.5}})
    assert any("model.dropout does nothing: objective 'dpo'" in note for note in idle_notes(given, 1))


def assert_the_bill_is_kept(out: Path) -> None:
    (summary,) = lines(out, "summary")
    for what in ("state_bytes", "transient_bytes", "host_bytes", "traffic_bytes"):
        assert summary[f"{what}_measured"] == summary[f"{what}_promised"]
    assert summary["peak_memory_bytes_promised"] > summary["state_bytes_promised"]


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_the_planner_bills_what_the_engine_holds(folder: Path, tmp_path: Path, objective: str) -> None:
    """Nothing beside the one model: the reference of DPO is computed in advance."""
    config = config_from_dict(values_of(folder, tmp_path, {"name": objective}))
    planned = {term.name: term.value for term in memory_of(setup_of(config, 2)).near_terms}

    def body(rank: int) -> tuple[int, int]:
        with open_session(config, Ranks(rank, 2, torch.device("cpu"))) as session:
            bill = engine_of(session.model).bill
            return bill.weight_bytes, bill.moments_bytes

    assert run_in_threads(2, body)[0] == (planned["weights"], planned["moments"])


def test_a_resumed_run_has_the_reference_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    """Also of pairs that are read for the first time after it, for more steps than were asked for."""
    sizes = {"batch": {"global_batch": 2, "micro_batch": 1, "sequence_length": 150}, "checkpoint": {"every": 1}}
    validation = {"data": {"validation_source": str(folder / "pairs.jsonl")}}
    whole = values_of(folder, tmp_path / "whole", {"name": "dpo"}, **sizes, **validation)
    train(whole, ranks=1)
    parts = whole | {"log": whole["log"] | {"folder": str(tmp_path / "parts")}}
    elsewhere = parts | {"log": whole["log"] | {"folder": str(tmp_path / "smaller")}}
    train(elsewhere | {"batch": sizes["batch"] | {"global_batch": 6}, "train": parts["train"] | {"steps": 1}}, ranks=1)
    train(elsewhere, ranks=1)  # its last steps read pairs that so few samples in a step would never have come to
    train(parts | {"train": parts["train"] | {"steps": 1}}, ranks=1)
    train(parts, ranks=1, stop_after=1)
    train(parts, ranks=1)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == STEPS
    measured = [lines(tmp_path / name, "validation")[-1] for name in ("whole", "parts")]
    assert measured[0]["loss"] == measured[1]["loss"] != pytest.approx(math.log(2))
    assert 0.0 < measured[0]["accuracy"] <= 1.0


def test_a_resumed_run_has_no_reference_of_another_model(folder: Path, tmp_path: Path) -> None:
    """Also where a run in between needed no more of it, and where the folder of the model has moved."""
    sizes = {"batch": {"global_batch": 2, "micro_batch": 2, "sequence_length": 150}, "checkpoint": {"every": 1}}
    first = values_of(folder, tmp_path / "run", {"name": "dpo"}, **sizes)

    def resumed(steps: int, stop_after: int | None = None, **model: str) -> None:
        values = first | {"model": first["model"] | model, "train": first["train"] | {"steps": steps}}
        train(values, ranks=1, stop_after=stop_after)

    torch.manual_seed(4)
    other = str(tmp_path / "lm2")
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(other)
    resumed(2, stop_after=1)
    with pytest.raises(BadInput, match=r"model\.weights is 'random' and was 'pretrained'.*to 'pretrained', or start"):
        resumed(3, weights="random")
    resumed(2, path=other)  # it has the reference of all pairs that it reads
    with pytest.raises(BadInput, match=r"model\.path is \S*lm2' and was \S*lm' .* 2 preference pairs"):
        resumed(3, path=other)
    resumed(3, path=f"{folder}/../{folder.name}/lm")
    assert len(losses(tmp_path / "run")) == 3


def test_a_resumed_run_tells_of_another_objective_and_of_nothing_that_a_checkpoint_could_not_know() -> None:
    (note,) = resume_notes(
        config_from_dict({"objective": {"name": "dpo", "beta": 0.2}}), {"objective": {"name": "dpo"}}
    )
    assert note == "resume: objective.beta is 0.2 in the configuration, which is used, and 0.1 in the checkpoint"
    assert resume_notes(config_from_dict({}), {}) == []
    options = {"optimizer": {"options": {"betas": [0.9, 0.95]}}}
    assert resume_notes(config_from_dict(options), options) == []
    (note,) = resume_notes(config_from_dict(options), {})
    assert note.startswith("resume: optimizer.options.betas is [0.9, 0.95] in the configuration")


def test_pairs_of_text_keep_prompt_and_completion_apart(tmp_path: Path) -> None:
    texts = [("What is it? ", "Two.", "Nothing at all"), ("And then? ", "Three", "Three"), ("Why? ", "", "So.")]
    records = [dict(zip(("prompt", "chosen", "rejected"), one, strict=True)) for one in texts]
    write_records(tmp_path / "pairs.jsonl", records)
    data = {"source": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path), "validation_fraction": 0}
    batch = {"sequence_length": 20}
    found = load_data(config_from_dict({"objective": "dpo", "data": data, "batch": batch}))
    inputs, targets = (
        found.train.batch(torch.arange(1).numpy()).inputs,
        found.train.batch(torch.arange(1).numpy()).targets,
    )
    assert len(found.train) == 1
    assert bytes(inputs[0][:12].tolist()).decode() == "What is it? "
    learnt = [bytes(row[(row != IGNORED) & (row != 256)].tolist()).decode() for row in targets]
    assert learnt == ["Two.", "Nothing a"]  # what does not fit is cut
    assert (targets == 256).sum(dim=1).tolist() == [1, 0]
    assert "3 preference pairs; 2 of two equal texts or with an empty one left out" in found.notes[0]
    assert "1 texts cut" in found.notes[0]


@pytest.mark.parametrize(("objective", "room"), [("dpo", 11), ("reward", 10)])
def test_pairs_that_are_cut_to_equal_texts_are_left_out(tmp_path: Path, objective: str, room: int) -> None:
    """`dpo` has room for one token more than `sequence_length`, its last target."""
    same = "0123456789abcdef"[: room - 1]
    texts = [(f"{same}x", f"{same}y"), (same, f"{same}y"), (same[:-1], f"{same}y")]  # and a token that ends each
    records = [{"prompt": "?", "chosen": one, "rejected": other} for one, other in texts]
    write_records(tmp_path / "pairs.jsonl", records)
    data = {"source": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path), "validation_fraction": 0}
    found = load_data(config_from_dict({"objective": objective, "data": data, "batch": {"sequence_length": 10}}))
    assert len(found.train) == 1
    assert "2 left out because both texts are equal as far as they fit" in found.notes[0]


def test_conversations_without_a_prompt_share_their_beginning(tmp_path: Path) -> None:
    implicit = [{side: pair["prompt"] + pair[side] for side in ("chosen", "rejected")} for pair in pairs()]
    written = write_records(tmp_path / "explicit.jsonl", pairs()), write_records(tmp_path / "implicit.jsonl", implicit)
    data = {"cache": str(tmp_path), "validation_fraction": 0}
    one, other = (
        load_data(config_from_dict({"objective": "dpo", "data": data | {"source": str(path)}})) for path in written
    )
    for index in range(len(one.train)):
        ours, theirs = (found.train.batch(torch.tensor([index]).numpy()) for found in (one, other))
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)


def test_a_pair_is_held_out_or_dropped_as_a_whole(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}? ", "chosen": "yes", "rejected": "no" * (1 + 9 * (n % 2))} for n in range(20)]
    write_records(tmp_path / "pairs.jsonl", records)
    data = {"source": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path), "too_long": "drop"}
    settings = {"data": data | {"validation_fraction": 0.3}, "batch": {"sequence_length": 12}}
    found = load_data(config_from_dict({"objective": "dpo", **settings}))
    assert found.validation is not None
    assert len(found.train) + len(found.validation) == 10
    for dataset in (found.train, found.validation):
        for index in range(len(dataset)):
            batch = dataset.batch(torch.tensor([index]).numpy())
            prompts = [bytes(row.tolist()).split(b"?")[0] for row in batch.inputs.clamp(max=255)]
            assert prompts[0] == prompts[1]
            assert batch.samples == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"lacks 'rejected'.*\['chosen', 'prompt'\]"),
        ({"chosen": "a", "rejected": "b"}, "'chosen' is str, 'rejected' is str, but.*'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, r"pairs\.jsonl:1: .*'rejected' is null, but"),
        ({"chosen": None, "rejected": turns("a", "b")}, "'chosen' is null, 'rejected' is list, but"),
        ({"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}, "remove 'prompt'"),
        ({"chosen": turns("a", "b"), "rejected": turns("x", "c")}, "no message before the completions"),
        ({"chosen": turns("a", "b"), "rejected": turns("a")}, "no completion after the prompt"),
        ({"text": "a"}, "lacks 'chosen'.*leave the objective out"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "1 preference pairs.*nothing to prefer"),
    ],
)
def test_records_that_are_no_pairs_are_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_records(tmp_path / "pairs.jsonl", [record])
    data = {"source": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path)}
    with pytest.raises(BadInput, match=message):
        load_data(config_from_dict({"objective": "dpo", "data": data}))


def test_text_for_pairs_and_pairs_for_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    write_records(tmp_path / "pairs.jsonl", pairs())
    for objective, name, message in (("reward", "a.txt", "plain text"), ("next_token", "pairs.jsonl", "objective=dpo")):
        data = {"source": str(tmp_path / name), "cache": str(tmp_path)}
        with pytest.raises(BadInput, match=message):
            load_data(config_from_dict({"objective": objective, "data": data}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective": {"name": "dpo"}, "data": {"packing": "whole"}}, "data.packing is 'whole': leave it out"),
        ({"objective": {"name": "dpo"}, "data": {"loss_on": "all"}}, "data.loss_on is 'all': leave it out"),
        ({"objective": {"name": "reward", "beta": 0.2}}, "beta without objective.name 'dpo'"),
        ({"objective": "reward", "checkpoint": {"save_format": "hf"}}, "model.kind to 'huggingface'"),
        (
            {
                "objective": "reward",
                "lora": {"rank": 4},
                "model": {"kind": "huggingface", "path": "m", "weights": "pretrained"},
            },
            "lora.rank would freeze",
        ),
    ],
)
def test_settings_of_objectives_that_do_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config_from_dict(values)


def test_a_model_without_a_score_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    with pytest.raises(BadInput, match="'mamba2' it has no model for sequence classification"):
        build_reward_model(tmp_path, torch.device("meta"))


@pytest.mark.parametrize(("model_type", "tensor"), [("bert", "classifier.bias"), ("ctrl", "classifier.weight")])
def test_a_model_whose_score_is_built_otherwise_is_refused(tmp_path: Path, model_type: str, tensor: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 1, "n_layer": 1}))
    with pytest.raises(BadInput, match=f"{model_type}.*has other tensors: {tensor}"):
        build_reward_model(tmp_path, torch.device("meta"))


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_looked_up_alone_costs_a_reward_model_no_flops(tmp_path: Path, tied: bool) -> None:
    """Its body has no head, whether the language model would have had one of its own: counted here by hand."""
    llama = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": tied, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(llama | sizes))
    model = build_reward_model(tmp_path, torch.device("meta"))
    matrices, norms, score = 2 * (4 * 32 * 32 + 3 * 32 * 64), (2 * 2 + 1) * 32, 32
    assert model.num_flops_per_token(16) == 6 * (matrices + norms + score) + 12 * 2 * 32 * 16


def test_tensors_have_the_names_of_transformers_and_are_known_to_the_planner(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"eos_token_id": 0}))
    built = build_reward_model(tmp_path, torch.device("meta"))
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**GPT2, num_labels=1)
        theirs = transformers.AutoModelForSequenceClassification.from_config(config)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (built, theirs)]
    assert shapes[0] == shapes[1]
    assert with_score(model_shape(tmp_path)).numel == sum(p.numel() for p in built.parameters())


def test_every_name_of_an_objective_has_a_row_and_a_class() -> None:
    names = set(get_args(ObjectiveConfig.model_fields["name"].annotation))
    assert names == set(OBJECTIVES) == set(CLASSES)
    kinds = {name: objective_of(config_from_dict({"objective": name})) for name in names}
    assert len({type(each) for each in kinds.values()}) == len(names)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_pair_without_a_reference_is_refused_and_one_that_fills_the_batch_is_not(samples: int) -> None:
    objective = DPO(config_from_dict({"objective": "dpo"}))
    tokens, reference = torch.zeros(4, 3, dtype=torch.int64), torch.tensor([[-1.0, -2.0], [torch.nan, -2.0]])
    batch = Batch(tokens, tokens, valid_tokens=12, samples=samples, reference=reference)
    if samples == 2:
        with pytest.raises(RuntimeError, match="error in Terrazzo"):
            objective.inputs(torch.nn.Linear(1, 1), batch, torch.device("cpu"))
    else:
        assert list(objective.inputs(torch.nn.Linear(1, 1), batch, torch.device("cpu"))) == ["input_ids"]


def test_smoothing_is_the_expectation_over_flipped_pairs() -> None:
    objective = DPO(config_from_dict({"objective": {"name": "dpo", "label_smoothing": 0.2}}))
    margins = torch.tensor([-2.0, 0.0, 3.0])
    plain, flipped = F.softplus(-margins), F.softplus(margins)
    found = objective.losses(margins)
    torch.testing.assert_close(found, 0.8 * plain + 0.2 * flipped)


def test_a_pair_of_which_neither_is_preferred_counts_half(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(config_from_dict({"objective": "reward"}))
    monkeypatch.setattr(objective, "margins", lambda *_: torch.tensor([1e-30, 0.0, -2.0, 0.0]))
    assert objective.measure(*[cast(Any, None)] * 3)[1] == 2.0


def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folders = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "launch.ignore_planner=true"]
    for objective in ("dpo", "reward"):
        config = load_config(
            "examples/dpo.yaml", [*folders, f"objective.name={objective}", "train.steps=2", "schedule.warmup_steps=1"]
        )
        check(config, 2)
        train(config.model_dump(mode="json"))
        first, _ = lines(tmp_path / "run", "validation")
        assert objective != "dpo" or first["accuracy"] == 0.5, "the policy is its reference"
