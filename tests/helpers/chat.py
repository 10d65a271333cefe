"""A small Hugging Face tokenizer with a chat template, and conversations of every kind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text as `CHATML`, with what the assistant writes marked as such."""

Messages = list[dict[str, str]]


def turns(*contents: str, system: str | None = None) -> Messages:
    """User and assistant in turns."""
    said = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *said] if system is not None else said


def conversations(count: int = 24) -> list[Messages]:
    """Of many lengths: with and without a system prompt, of one to four turns, and some empty answers."""
    found = []
    for n in range(count):
        said = [(f"what comes after {n + i}?", f"{n + i} is it. " * (n % 4)) for i in range(1 + n % 3)]
        found.append(turns(*itertools.chain(*said), system="count, and be brief" if n % 2 else None))
    return found


def write_records(path: Path, records: list[Any]) -> Path:
    """JSONL of conversations, or of whole records."""
    lines = [json.dumps({"messages": record} if isinstance(record, list) else record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def save_tokenizer(folder: Path, template: str | None = MARKED) -> Path:
    """A byte-level BPE with a few merges, trained on the spot; `<|im_start|>` and `<|im_end|>` are single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        show_progress=False,
    )
    backend.train_from_iterator([m["content"] for messages in conversations() for m in messages], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template)
    tokenizer.save_pretrained(str(folder))
    return folder
