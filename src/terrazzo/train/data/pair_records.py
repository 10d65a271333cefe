"""Preference pairs, as TRL and the data sets of the Hugging Face Hub have them.

Text: `prompt`, `chosen` and `rejected` are strings. Conversations: they are lists of messages; without `prompt` it is
the messages that both begin with.
"""

from __future__ import annotations

from typing import Any

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean
from terrazzo.train.data.records import TOOLS_FIELD, Document, Message, encodable, messages_of, tools_of

__all__ = ["PairRecords"]

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


class PairRecords:
    """Records of `chosen` and `rejected`, with or without `prompt` and `tools`."""

    description = f"the fields {CHOSEN!r} and {REJECTED!r}, of a preference pair"

    def check_text(self, where: str) -> None:
        """Raises `BadInput`: plain text has no pairs."""
        raise BadInput(
            f"{where!r} is plain text, and objective dpo and reward take preference pairs. Give JSONL, parquet or a"
            f" data set with {self.description}, or leave the objective out."
        )

    def columns(self, columns: list[str], where: str) -> list[str]:
        """The columns of a pair that a table has; raises `BadInput` where one is missing."""
        _check_fields(columns, f"{where!r}", "columns")
        return [name for name in (PROMPT, CHOSEN, REJECTED, TOOLS_FIELD) if name in columns]

    def document(self, record: dict[str, Any], name: str, where: str) -> Document:
        """The chosen text or conversation, which has the rejected one."""
        _check_fields(record, where, "fields")
        kinds = {field: type(record[field]) for field in (PROMPT, CHOSEN, REJECTED) if record.get(field) is not None}
        if {CHOSEN, REJECTED} <= kinds.keys():
            if set(kinds.values()) == {str} and PROMPT in kinds:
                return _text_pair(record, name, where)
            if set(kinds.values()) == {list}:
                return _conversation_pair(record, name, where)
        there = [field for field in (PROMPT, CHOSEN, REJECTED) if field in record]
        kinds_text = ", ".join(f"{field!r} is {kinds[field].__name__ if field in kinds else 'null'}" for field in there)
        raise BadInput(
            f"{where}: {kinds_text}, but a preference pair has {PROMPT!r}, {CHOSEN!r} and {REJECTED!r} as strings, or"
            f" {CHOSEN!r} and {REJECTED!r}, and {PROMPT!r} if it is there, as lists of messages. Correct the record;"
            f" where both conversations hold the prompt already, remove {PROMPT!r}."
        )


def _check_fields(fields: Any, where: str, what: str) -> None:
    for needed in (CHOSEN, REJECTED):
        if needed not in fields:
            raise BadInput(
                f"{where} lacks {needed!r} of a preference pair; its {what} are {sorted(fields)}."
                f"{did_you_mean(needed, fields)} Rename them, or leave the objective out to learn text."
            )


def _text_pair(record: dict[str, Any], name: str, where: str) -> Document:
    prompt = encodable(record[PROMPT], where)
    chosen, rejected = (prompt + encodable(record[field], where) for field in (CHOSEN, REJECTED))
    prompt_length = len(prompt)
    return Document(
        name, chosen, prompt_length=prompt_length, rejected=Document(name, rejected, prompt_length=prompt_length)
    )


def _conversation_pair(record: dict[str, Any], name: str, where: str) -> Document:
    chosen, rejected = (messages_of(record[field], field, where) for field in (CHOSEN, REJECTED))
    tools = tools_of(record.get(TOOLS_FIELD), where)
    if record.get(PROMPT) is None:
        prompt_length = _common(chosen, rejected)
    else:
        prompt = messages_of(record[PROMPT], PROMPT, where)
        prompt_length, chosen, rejected = len(prompt), [*prompt, *chosen], [*prompt, *rejected]
    if prompt_length in (0, len(chosen), len(rejected)):
        lacking = "no message before the completions" if prompt_length == 0 else "no completion after the prompt"
        raise BadInput(
            f"{where}: the pair has {lacking}. Begin {CHOSEN!r} and {REJECTED!r} with the same messages and end each"
            f" with another one, or give {PROMPT!r}."
        )
    other = Document(name, messages=rejected, tools=tools, prompt_length=prompt_length)
    return Document(name, messages=chosen, tools=tools, prompt_length=prompt_length, rejected=other)


def _common(chosen: list[Message], rejected: list[Message]) -> int:
    """How many messages both begin with."""
    pairs = zip(chosen, rejected, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
