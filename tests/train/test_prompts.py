"""Prompts whose tokens see each other in both directions, against plain loops in fp64 over what each token sees."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from terrazzo.config import config_from_dict
from terrazzo.engine import compile_units
from terrazzo.errors import BadInput, Misuse
from terrazzo.planner.timing.attention import attention_bytes, attention_flops
from terrazzo.train.data import load_data
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.causal_lm import generate, num_flops_per_token
from terrazzo.train.model.decoder import Block, Decoder
from terrazzo.train.model.objectives import completion_log_probs, objective_of
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.planning.run_estimate import traced_memory
from tests.helpers.chat import Messages, turns, write_records
from tests.train.test_context import said, settings
from tests.train.test_model import config, plain_logits, tokens_of
from tests.train.test_planning import HOST
from tests.train.test_preferences import lines, train

PREFIX = {"attention": {"prefix": True}}
APART = {"packing": "whole", "attention": "document"}


def asked(count: int) -> list[Messages]:
    """Conversations of one answer, or of two, whose prompts differ in length."""
    return [turns(f"{n} " * (n % 4), f"{n + 1}", *(("on", f"{n + 2}") if n % 3 == 0 else ())) for n in range(count)]


def text_of(messages: Messages) -> bytes:
    return b"".join(f"<|{each['role']}|>\n{each['content']}\0".encode() for each in messages)


def prompt_of(text: bytes) -> int:
    """Bytes up to where the first answer begins."""
    start = b"<|assistant|>\n"
    return text.index(start) + len(start)


def random_model(vocab_size: int = 61, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config(attention=AttentionPattern(prefix=True), vocab_size=vocab_size, **changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def test_logits_of_prompts_equal_the_plain_computation() -> None:
    model, tokens = random_model(), tokens_of((2, 13))
    for prompt in (0, 1, 6, 13):
        expected = plain_logits(model, tokens, prompt=prompt)
        found = model(tokens, prefix_lengths=torch.full_like(tokens, prompt))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    two = torch.cat((plain_logits(model, tokens, prompt=5), plain_logits(model, tokens, prompt=9)), dim=1)
    positions = torch.arange(13).repeat(2).expand(2, -1)
    lengths = torch.tensor([5] * 13 + [9] * 13).expand(2, -1)
    found = model(torch.cat((tokens, tokens), dim=1), positions, lengths)
    torch.testing.assert_close(found.double(), two, rtol=1e-4, atol=1e-4)


def test_a_model_is_called_with_lengths_or_without_as_it_was_built() -> None:
    tokens = tokens_of((1, 8))
    with pytest.raises(Misuse, match=r"called without prefix_lengths: give of each token"):
        random_model()(tokens)
    with pytest.raises(Misuse, match=r"its attention is causal.*AttentionPattern\(prefix=True\)"):
        Decoder(config())(tokens, prefix_lengths=tokens)
    for wrong in ({"prefix": True, "window": 4}, {"prefix": True, "full_every": 2}, {}):
        with pytest.raises(BadInput, match=r"prefix mask or one within a window"):
            AttentionPattern(**wrong)  # type: ignore[arg-type]


def test_what_is_written_follows_the_prompt() -> None:
    model, tokens = random_model(), tokens_of((1, 7))
    written = generate(model, tokens, 3, temperature=0.0)
    for length in (7, 8, 9):
        logits = plain_logits(model, written[:, :length], prompt=7)
        assert written[0, length] == logits[0, -1].argmax()
    short = random_model(max_sequence_length=8)
    written = generate(short, tokens, 4, temperature=0.0)  # the last is written after 6 of the prompt's tokens
    assert written[0, 9] == plain_logits(short, written[:, 1:9], prompt=6)[0, -1].argmax()


def data_of(folder: Path, records: list[Any], **data: Any) -> tuple[Any, Any]:
    source = write_records(folder / "records.jsonl", records)
    values = {"source": str(source), "cache": str(folder), "validation_fraction": 0} | data
    settings = config_from_dict({"model": PREFIX, "data": values, "batch": {"sequence_length": 128}})
    return load_data(settings), settings


@pytest.mark.parametrize("data", [APART, {}], ids=["packed", "single"])
def test_the_loss_is_that_of_each_conversation_after_its_prompt(tmp_path: Path, data: dict[str, str]) -> None:
    records = asked(5)
    found, settings = data_of(tmp_path, records, **data)
    assert len(found.train) == (5 if not data else 2)
    model = random_model(257, layers=2, max_sequence_length=128)
    batch = found.train.batch(torch.arange(len(found.train)).numpy())
    objective = objective_of(settings)
    loss = objective.loss_of(model, model(**objective.inputs(model, batch, torch.device("cpu"))), batch)
    expected = torch.zeros((), dtype=torch.float64)
    for messages in records:
        text = text_of(messages)
        tokens, learnt = torch.tensor([byte or 256 for byte in text]), torch.tensor(learnt_of(messages))
        logits = plain_logits(model, tokens[None, :-1], prompt=prompt_of(text))[0]
        expected += (F.cross_entropy(logits, tokens[1:], reduction="none") * learnt[1:]).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def learnt_of(messages: Messages) -> list[bool]:
    """Which bytes of the text are the assistant's, the end of its turns among them."""
    learnt: list[bool] = []
    for each in messages:
        is_answer, said = each["role"] == "assistant", len(each["content"]) + 1
        learnt += [False] * (len(f"<|{each['role']}|>\n")) + [is_answer] * said
    return learnt


def test_a_stream_has_the_prompts_of_pieces(tmp_path: Path) -> None:
    """A piece that begins inside of a prompt has the rest of it; what begins inside of an answer sees nothing ahead."""
    records = [turns("a" * 140, "b" * 150), *asked(9)]
    found, _ = data_of(tmp_path, records, packing="stream", attention="document")
    batch = found.train.batch(torch.arange(len(found.train)).numpy())
    assert batch.prefixes is not None
    stream = [(number, learnt) for number, messages in enumerate(records) for learnt in learnt_of(messages)]
    for row, lengths in enumerate(batch.prefixes.tolist()):
        first, end = 128 * row, min(128 * (row + 1), len(stream))
        for number in {number for number, _ in stream[first:end]}:
            places = [place for place in range(first, min(end + 1, len(stream))) if stream[place][0] == number]
            begin = places[0]
            learnt = [place for place in places[1:] if stream[place][1]]
            expected = learnt[0] - begin if learnt else 0
            inputs = [place for place in places if place < end]
            assert [lengths[place - first] for place in inputs] == [expected] * len(inputs)


def test_pairs_have_the_prompts_of_their_completions(tmp_path: Path) -> None:
    prompt, answers = turns("one", "two", "three"), ("four", "a hundred")
    chosen, rejected = ([{"role": "assistant", "content": each}] for each in answers)
    source = write_records(tmp_path / "pairs.jsonl", [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    data = {"source": str(source), "cache": str(tmp_path), "validation_fraction": 0}
    values = {"model": PREFIX, "data": data, "objective": {"name": "dpo"}, "batch": {"sequence_length": 128}}
    batch = load_data(settings := config_from_dict(values)).train.batch(torch.arange(1).numpy())
    texts = [text_of([*prompt, *each]) for each in (chosen, rejected)]
    length = len(text_of(prompt)) + len(b"<|assistant|>\n")
    model, wanted = random_model(257, layers=1, max_sequence_length=128), []
    for text in texts:
        tokens = torch.tensor([byte or 256 for byte in text])
        logits = plain_logits(model, tokens[None, :-1], prompt=length)[0]
        wanted.append(-F.cross_entropy(logits[length - 1 :], tokens[length:], reduction="sum"))
    inputs = objective_of(settings).inputs(model, replace(batch, reference=torch.zeros(1, 2)), torch.device("cpu"))
    found = completion_log_probs(model, model(**inputs), batch)
    torch.testing.assert_close(found.double(), torch.stack(wanted)[None], rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore::DeprecationWarning")
def test_compiled_blocks_see_the_same_prompts_and_are_compiled_once() -> None:
    model, graphs = random_model(layers=1), []
    compiled = copy.deepcopy(model)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_units(compiled, units=[Block], backend=backend)
    for first, prompts in ((3, (2, 9)), (14, (0, 18))):
        tokens, positions = tokens_of((2, 32)), torch.cat((torch.arange(first), torch.arange(32 - first))).expand(2, -1)
        lengths = torch.tensor(prompts).repeat_interleave(torch.tensor((first, 32 - first))).expand(2, -1)
        pairs = [(each(tokens, positions, lengths), list(each.parameters())) for each in (model, compiled)]
        one, other = ([logits, *torch.autograd.grad(logits.square().sum(), of)] for logits, of in pairs)
        torch.testing.assert_close(other, one)
    assert len(graphs) == 1


def test_texts_have_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no record of data.source has 'messages'\. Remove it, or give conversations"):
        data_of(tmp_path, [{"text": "a text"}])


def on_mesh(folder: Path, ranks: int, mesh: dict[str, int], mode: str = "gather", **train: Any) -> dict[str, Any]:
    source = str(write_records(folder / "chats.jsonl", asked(120)))
    values = settings(folder, ranks, 1, mode, model=PREFIX | {"layers": 2}, data={"source": source} | APART)
    values["plan"]["mesh"] = mesh
    values["batch"]["sequence_length"] = 128
    values["train"] |= {"eval_batches": 2, "sample_tokens": 0 if "pp" in mesh else 8, **train}
    return values


@cache
def alone() -> Path:
    values = on_mesh(Path(mkdtemp()), 1, {})
    train(values, 1)
    return Path(values["log"]["folder"])


@pytest.mark.parametrize(
    ("mesh", "mode", "more"),
    [
        ({"cp": 2}, "ulysses", {}),
        pytest.param({"tp": 2}, "gather", {"activation_checkpointing": "selective"}, marks=pytest.mark.long),
        pytest.param({"cp": 2}, "ring", {"activation_checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param({"cp": 2, "tp": 2}, "gather", {}, marks=pytest.mark.long),
        ({"pp": 2}, "gather", {}),
    ],
    ids=str,
)
def test_prompts_are_the_same_on_every_mesh(tmp_path: Path, mesh: dict[str, int], mode: str, more: Any) -> None:
    ranks = mesh.get("cp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    values = on_mesh(tmp_path, ranks, mesh, mode, **more)
    folder, first = Path(values["log"]["folder"]), "checkpoints/step-00000001"
    shutil.copytree(alone() / first, folder / first)
    train(values, ranks)
    rows = [
        [[line[key] for key in ("loss", "grad_norm", "tokens")] for line in lines(it, "train")]
        for it in (folder, alone())
    ]
    torch.testing.assert_close(torch.tensor(rows[0]), torch.tensor(rows[1][1:]), rtol=2e-5, atol=0)
    if "pp" not in mesh:
        assert said(folder)[2] == said(alone())[2]
    (summary,) = lines(folder, "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]


def test_the_planner_counts_tiles_and_causal_products() -> None:
    batch = {"sequence_length": 1024, "micro_batch": 1}
    prompts, causal = (config_from_dict({"model": model, "batch": batch}) for model in (PREFIX, {}))
    setups = [setup_of(each, 1, HOST) for each in (prompts, causal)]
    one, other = (setup.model.repeated[0].block for setup in setups)
    assert one is not None and other is not None and one.prefix and not other.prefix
    assert attention_flops(setups[0], one) == attention_flops(setups[1], other)
    assert attention_bytes(setups[0], one) > attention_bytes(setups[1], other) == 0
    models = [prepare_model(each) for each in (prompts, causal)]
    assert num_flops_per_token(models[0], 1024) == num_flops_per_token(models[1], 1024)
    memory = [traced_memory(each, setup) for each, setup in zip((prompts, causal), setups, strict=True)]
    assert memory[0] is not None and memory[1] is not None
    assert memory[0].allocated_bytes > memory[1].allocated_bytes  # a mask, and outputs in fp32
