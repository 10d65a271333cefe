"""The prompts of text samples: a text to continue, or a message to answer."""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.data import Prompt, TokenData, load_chat

__all__ = ["Sampling", "question_of", "sampling_of"]


class Sampling(NamedTuple):
    """The prompt of samples as tokens, empty if there are no samples, and the message that they answer, if any."""

    prompt: list[int]
    question: Prompt | None

    def check_vocabulary(self, config: Config, data: TokenData, vocab_size: int) -> None:
        """Raise `BadInput` for a token that the model does not have."""
        if max(self.prompt, default=0) >= vocab_size:
            key = "sample_prompt" if config.train.sample_chat is None else "sample_chat"
            raise BadInput(
                f"train.{key} has token id {max(self.prompt)}, but the model's vocabulary has ids 0 to"
                f" {vocab_size - 1} only. Set model.vocab_size to at least {data.tokenizer.vocab_size}, use the model's"
                " own tokenizer, or set train.sample_tokens to 0."
            )


def question_of(config: Config, data: TokenData) -> Prompt | None:
    """The message that samples answer, rendered by the chat template; None if samples continue a text."""
    settings, question = config.data, config.train.sample_chat
    if question is None:
        return None
    return load_chat(data.tokenizer, settings.tokenizer, settings.chat_template, settings.loss_on).ask(question)


def _prompt(config: Config, data: TokenData, question: Prompt | None) -> list[int]:
    """The tokens of the prompt; empty for models that write no text: those with a score, and pipelines."""
    if not config.train.sample_tokens or config.objective.kind.scored or config.plan.mesh.pp > 1:
        return []
    if question is not None:
        return question.tokens
    tokens: list[int] = data.tokenizer.encode([config.train.sample_prompt])[0].tolist()
    return tokens or [data.tokenizer.end_of_document]


def sampling_of(config: Config, data: TokenData, question: Prompt | None) -> Sampling:
    """The prompt of this run's samples; `question` is what `question_of` has returned."""
    return Sampling(_prompt(config, data, question), question)
