"""The answer to a question at the end of a run, against `generate` of transformers with the exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import latest
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.data import load_chat, load_data, load_tokenizer
from terrazzo.train.preflight.idle_keys import idle_notes
from terrazzo.train.steps import evaluate
from tests.helpers.chat import CHATML, MARKED, conversations, save_tokenizer, write_records
from tests.train.test_preferences import folder, lines, train, values_of

transformers = pytest.importorskip("transformers")
__all__ = ["folder"]  # the fixture
QUESTION = "what comes after 7?"


def values_with_question(folder: Path, out: Path) -> dict[str, Any]:
    values = values_of(folder, out, {"name": "next_token"}, checkpoint={"save_format": "hf"})
    values["data"]["source"] = str(write_records(out / "chats.jsonl", conversations(8)))
    values["train"] |= {"steps": 1, "sample_tokens": 12, "sample_chat": QUESTION}
    return values


def test_a_run_ends_with_the_answer_that_its_weights_give(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(values_with_question(folder, tmp_path))
    (sample,) = lines(tmp_path, "sample")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    written = model.generate(**asked, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0)
    answer = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sample["text"] == f"{QUESTION} → {answer}"
    assert answer
    assert f"sample    {QUESTION} → " in capsys.readouterr().out


def test_an_answer_stops_where_the_turn_ends(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")

    def generated(model: Any, tokens: torch.Tensor, steps: int, temperature: float) -> torch.Tensor:
        assert (steps, temperature) == (12, 0.0)
        more = tokenizer("eight<|im_end|>\nand more", return_tensors="pt")["input_ids"]
        return torch.cat((tokens, more), dim=1)

    monkeypatch.setattr(evaluate, "generate", generated)
    train(values_with_question(folder, tmp_path), ranks=1)
    assert lines(tmp_path, "sample")[0]["text"] == f"{QUESTION} → eight"


@pytest.mark.parametrize("template", [CHATML, MARKED, "bytes"])
def test_a_question_is_what_training_would_have_before_the_answer(tmp_path: Path, template: str) -> None:
    name = "bytes" if template == "bytes" else str(save_tokenizer(tmp_path, template))
    tokenizer = load_tokenizer(name)
    asked = load_chat(tokenizer, name, None, "assistant").ask(QUESTION)
    if name == "bytes":
        text = f"<|user|>\n{QUESTION}\0<|assistant|>\n".encode()
        assert asked.tokens == [256 if byte == 0 else byte for byte in text]
        assert asked.ends == [256]
    else:
        backend = transformers.AutoTokenizer.from_pretrained(name)
        assert backend.decode(asked.tokens) == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        assert backend.convert_ids_to_tokens(asked.ends) == ["<|im_end|>", "<|endoftext|>"]


def test_a_tokenizer_without_a_template_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    values = values_with_question(folder, tmp_path)
    values["data"] |= {"tokenizer": str(save_tokenizer(tmp_path / "plain", None)), "source": str(tmp_path / "a.txt")}
    (tmp_path / "a.txt").write_text("some text\n" * 400)
    with pytest.raises(BadInput, match=r"train\.sample_chat.*has no chat template"):
        train(values)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("key", ["sample_chat", "sample_prompt"])
def test_a_question_outside_the_vocabulary_is_refused_before_training(folder: Path, tmp_path: Path, key: str) -> None:
    values = values_with_question(folder, tmp_path) | {"model": {"dim": 8, "layers": 1, "heads": 1}, "checkpoint": {}}
    values["data"]["source"] = str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("q z q\n" * 400)
    data = load_data(config_from_dict(values))
    values["model"]["vocab_size"] = data.train.cache.header.max_token + 1
    values["train"] = {"steps": 1, "sample_tokens": 1, key: "à"}
    with pytest.raises(BadInput, match=rf"train\.{key} has token id \d+.*set train.sample_tokens to 0"):
        train(values, ranks=1)
    assert not (tmp_path / "metrics.jsonl").exists()
    values["train"]["sample_tokens"] = 0
    train(values, ranks=1)


def test_a_run_is_saved_before_it_answers(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr("terrazzo.train.loop.sample_text", lambda session: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(values_with_question(folder, tmp_path), ranks=1)
    assert latest(tmp_path / "checkpoints") is not None


def test_settings_of_samples_that_do_not_fit_together() -> None:
    with pytest.raises(BadInput, match="sample_prompt and sample_chat: give one"):
        config_from_dict({"train": {"sample_prompt": "a", "sample_chat": "b"}})
    quiet = config_from_dict({"train": {"sample_tokens": 0, "sample_chat": "b"}})
    assert any("train.sample_chat does nothing: train.sample_tokens is 0" in note for note in idle_notes(quiet, 1))
