"""Short runs of Hugging Face's Trainer on a tiny model, theirs and ours alike, for tests to compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 61, 12
PATIENCE_S = 180.0
"""The first run imports transformers in every process."""


def tiny_model(**changes: Any) -> Any:
    """A Llama of some thousand parameters, the same on every call."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **{**sizes, **changes})
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    """One token for each of some words."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<end>": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def sequences(count: int = 32) -> list[dict[str, Any]]:
    """Sequences that a model can learn; each has its own number of labels that count."""
    drawn = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        start, step = torch.randint(1, VOCABULARY, (2,), generator=drawn).tolist()
        tokens = [(start + step * place) % VOCABULARY for place in range(LENGTH)]
        masked = index % 5
        found.append({"input_ids": tokens, "labels": [-100] * masked + tokens[masked:]})
    return found


def for_accelerate() -> None:
    """Accelerate reads more of torchrun's variables than a group that is there needs."""
    if "RANK" in os.environ:
        told = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        for name, value in told.items():
            os.environ.setdefault(name, value)


QUIET: dict[str, Any] = {
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "seed": 5,
    "max_steps": 4,
}
"""Arguments of a short run that logs every step."""


class Run:
    """A training run, finished.

    Args:
        plan: None for the unmodified Trainer.
        given: TrainingArguments beside `QUIET`.
        trainer: further arguments of the trainer.
        resume: as for `train`.
    """

    def __init__(
        self,
        folder: Path,
        plan: str | None = None,
        given: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        resume: Any = None,
    ) -> None:
        import transformers

        from terrazzo.integrations.transformers import TerrazzoArguments, Trainer

        for_accelerate()
        arguments = transformers.TrainingArguments(str(folder), **{**QUIET, **(given or {})})
        further: dict[str, Any] = {"model": tiny_model(), "train_dataset": sequences(), **(trainer or {})}
        if plan is None:
            self.trainer: Any = transformers.Trainer(args=arguments, **further)
        else:
            further.setdefault("terrazzo", TerrazzoArguments(plan=plan))
            self.trainer = Trainer(args=arguments, **further)
        self.trainer.train(resume_from_checkpoint=resume)

    def logged(self, name: str = "loss") -> list[float]:
        """A number of each step."""
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model, on every rank."""
        return whole(self.trainer.model)


def whole(model: Any) -> dict[str, Tensor]:
    """Full weights by name, of a sharded model or of any."""
    import terrazzo as tz

    if not hasattr(model, "_terrazzo"):
        return {name: value.detach().clone() for name, value in model.named_parameters()}
    with tz.gathered(model) as parameters:
        return {name: value.detach().clone() for name, value in parameters.items()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two models' weights."""
    assert one.keys() == other.keys()
    return max((value - other[name]).abs().max().item() for name, value in one.items())
