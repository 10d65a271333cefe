"""What scripts would download: tiny models, tokenizers, data sets and a metric, under the names that they ask for."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["make"]

WORDS = 60


def make(folder: Path) -> None:
    """Put all of them into `folder`, in which scripts are then run."""
    _bert(folder / "bert-base-cased")
    _llama(folder / "HuggingFaceTB" / "SmolLM-360M")
    _llama(folder / "tiny-llama")
    _glue(folder / "nyu-mll" / "glue")
    _wikitext(folder / "Salesforce" / "wikitext")
    _llama(folder / "tiny-teacher", seed=1)
    _preferences(folder)
    _graph(folder / "cora")
    (folder / "data").mkdir()
    for name, count in (("wikitext-2", 600), ("train", 200), ("valid", 40), ("test", 40)):
        text = "".join(_sentence(index, 12) + "\n" for index in range(count))
        (folder / "data" / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "evaluate.py").write_text(_EVALUATE, encoding="utf-8")
    (folder / "rewards.py").write_text(_REWARDS, encoding="utf-8")


def _sentence(index: int, length: int = 8) -> str:
    return " ".join(f"w{(index * 7 + place * (1 + index % 5)) % WORDS}" for place in range(length))


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(WORDS))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[SEP]", cls_token="[CLS]", model_max_length=64
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} [SEP] {% endfor %}"
    tokenizer.save_pretrained(folder)


def _bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    _tokenizer(folder)


def _llama(folder: Path, seed: int = 0) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer(folder)


def _data_set(folder: Path, name: str, splits: dict[str, list[dict[str, object]]]) -> None:
    """A data set of one configuration, as `load_dataset(folder, name)` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in splits)
    card = f"---\nconfigs:\n- config_name: {name}\n  data_files:{files}\n---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _glue(folder: Path) -> None:
    def rows(first: int, count: int) -> list[dict[str, object]]:
        return [
            {"sentence1": _sentence(index), "sentence2": _sentence(index + index % 2), "label": index % 2, "idx": index}
            for index in range(first, first + count)
        ]

    _data_set(folder, "mrpc", {"train": rows(0, 96), "validation": rows(96, 32), "test": rows(128, 32)})


def _wikitext(folder: Path) -> None:
    def rows(first: int, count: int) -> list[dict[str, object]]:
        return [{"text": _sentence(index, 4 + index % 9)} for index in range(first, first + count)]

    _data_set(folder, "wikitext-2-v1", {"train": rows(0, 600), "validation": rows(600, 32), "test": rows(632, 32)})


def _preferences(folder: Path) -> None:
    """One data set for each kind of TRL's trainers."""
    count = range(48)
    kinds: dict[str, list[dict[str, object]]] = {
        "language": [{"text": _sentence(index)} for index in count],
        "prompts": [{"prompt": [{"role": "user", "content": _sentence(index, 3)}]} for index in count],
        "pairs": [
            {"prompt": _sentence(index, 3), "chosen": " " + _sentence(index + 1, 4), "rejected": " " + _sentence(2, 3)}
            for index in count
        ],
        "rated": [
            {"prompt": _sentence(index, 3), "completion": " " + _sentence(index + 1, 4), "label": index % 3 > 0}
            for index in count
        ],
        "triples": [
            {
                "prompt": _sentence(index, 3),
                "chosen": " " + _sentence(index + 1, 4),
                "rejected": " " + _sentence(2, 3),
                "reference": " " + _sentence(index + 2, 4),
            }
            for index in count
        ],
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": _sentence(index, 3)},
                    {"role": "assistant", "content": _sentence(index + 1, 4)},
                ]
            }
            for index in count
        ],
    }
    for kind, rows in kinds.items():
        _data_set(folder / kind, "default", {"train": rows, "test": rows[:8]})


def _graph(folder: Path) -> None:
    """A citation graph as Cora's files have it: features and class of each paper, and who cites whom."""
    folder.mkdir()
    papers = [
        [str(index), *(str(int((index * word) % 5 == 0)) for word in range(1, 9)), f"c{index % 3}"]
        for index in range(40)
    ]
    (folder / "cora.content").write_text("".join("\t".join(each) + "\n" for each in papers), encoding="utf-8")
    cites = "".join(f"{index}\t{(index * 7 + 3) % 40}\n" for index in range(40))
    (folder / "cora.cites").write_text(cites, encoding="utf-8")


_REWARDS = '''"""A stand-in for a reward: the share of words whose number is even."""


def even(completions, **_):
    texts = [each[0]["content"].split() for each in completions]
    return [sum(word[-1] in "02468" for word in words) / max(1, len(words)) for words in texts]
'''
_EVALUATE = '''"""A stand-in for the library `evaluate`: accuracy."""


class _Accuracy:
    def __init__(self):
        self.right = self.all = 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self):
        return {"accuracy": self.right / self.all, "f1": self.right / self.all}


def load(*names):
    return _Accuracy()
'''
