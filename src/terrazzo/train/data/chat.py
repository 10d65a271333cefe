"""Turns conversations into tokens, and decides which of them are learnt.

The built-in template, for the built-in tokenizer, writes each message as `<|role|>`, a line end, the content, and the
end-of-document token. A Hugging Face tokenizer brings a template of its own (`chat_template` in tokenizer_config.json,
or chat_template.jinja), or `data.chat_template` names one; `transformers` renders it, in its sandbox and
in a process of its own (`rendering`).

With `loss_on="assistant"` only what the assistant wrote is learnt. A template with `{% generation %}` marks that
itself. With any other template it is what is added from the generation prompt to the end of the turn. Every such place
is checked: the text up to it must be a prefix of the whole text, and its tokens a prefix of the whole tokens. In a
preference pair everything after the prompt is learnt, and its place is checked likewise.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from terrazzo.errors import BadInput
from terrazzo.train.data.records import ASSISTANT, Document, Message
from terrazzo.train.data.rendering import Failed, render
from terrazzo.train.data.tokenizer import BYTES, MAX_BYTES, TokenArray, Tokenizer, check_files, missing_extra
from terrazzo.untrusted_files import read_plain

__all__ = ["Chat", "Prompt", "Rendered", "chat_fingerprint", "check_own_template", "load_chat", "text_completion"]

LossOn = Literal["assistant", "all"]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)

MAX_TEMPLATE_BYTES = 1 << 20

Marked = tuple[str, list[tuple[int, int]]]
"""A text, and the ranges of characters in it that the template marks."""


@dataclass(frozen=True)
class Rendered:
    """A conversation in tokens. `spans` are the ranges `[start, stop)` of those to learn, in order.

    The first token of a conversation is never learnt, since nothing comes before it. `span_bytes` is the UTF-8 text of
    the spans.
    """

    tokens: TokenArray
    spans: list[tuple[int, int]]
    span_bytes: int


class Prompt(NamedTuple):
    """A user's message in tokens, up to where the assistant begins to write, and the tokens that end what it writes."""

    tokens: list[int]
    ends: list[int]


class Chat(Protocol):
    """Renders conversations one by one."""

    def ask(self, question: str) -> Prompt:
        """The tokens of a user's message; raises `BadInput` if the template does not take one."""

    def render(self, document: Document) -> Rendered:
        """A conversation in tokens; raises `BadInput`, naming the document, if the template cannot fully render it."""


def load_chat(tokenizer: Tokenizer, name: str, template: str | Path | None, loss_on: LossOn) -> Chat:
    """The renderer of `data.tokenizer` `name`. The file `template` takes the place of the tokenizer's own template.

    Raises:
        BadInput: there is no template, or it cannot be read.
    """
    if name == BYTES:
        return _PlainChat(tokenizer, loss_on)
    template_text = None if template is None else _read_template(Path(template))
    origin = f"the chat template of data.tokenizer '{name}'" if template is None else f"data.chat_template '{template}'"
    return _TemplateChat(
        _load_backend(Path(name).expanduser()), template_text, loss_on, origin, tokenizer.end_of_document
    )


def check_own_template(name: str, template: str | Path | None) -> None:
    """Raise `BadInput` for a template beside the built-in tokenizer, which has its own."""
    if template is not None and name == BYTES:
        raise BadInput(
            f"data.chat_template is '{template}', but the tokenizer '{BYTES}' has a template of its own. "
            "Leave data.chat_template out, or set data.tokenizer to the folder of a Hugging Face tokenizer."
        )


def chat_fingerprint(name: str, template: str | Path | None, loss_on: LossOn) -> str:
    """Changes with whatever decides how a conversation is rendered; reads small files, and imports nothing.

    Raises:
        BadInput: one of them is no plain file, or is too large; `template` is given for the built-in tokenizer.
    """
    check_own_template(name, template)
    digest = hashlib.sha256(loss_on.encode())
    if name == BYTES and loss_on == "all":
        digest.update(b"text of the whole spans")  # caches were made that count the content's alone
    if template is not None:
        digest.update(_read_template(Path(template)).encode())
    if name != BYTES:
        folder = _folder_of(Path(name).expanduser())
        check_files(folder)
        files = [path for pattern in TEMPLATE_FILES for path in sorted(folder.glob(pattern))]
        digests = [hashlib.sha256(read_plain(path, MAX_BYTES)).hexdigest() for path in files]
        digest.update("".join(f"{path.name}:{one};" for path, one in zip(files, digests, strict=True)).encode())
    return digest.hexdigest()


def _read_template(path: Path) -> str:
    """The text of a template file."""
    try:
        return read_plain(path.expanduser(), MAX_TEMPLATE_BYTES).decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise BadInput(
            f"data.chat_template '{path}' cannot be read as UTF-8 text ({error}). Correct the path."
        ) from None


def _folder_of(path: Path) -> Path:
    """The folder of a tokenizer that is given as its folder, or as the tokenizer.json in it."""
    return path if path.is_dir() else path.parent


def _load_backend(path: Path) -> Any:
    """The `transformers` tokenizer in a local folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers") from error
    check_files(_folder_of(path))
    try:
        backend = AutoTokenizer.from_pretrained(str(_folder_of(path)), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many kinds, by what is missing in the folder
        raise BadInput(
            f"The data hold conversations, and transformers cannot load the tokenizer in {str(_folder_of(path))!r} to "
            f"render them ({error}). Save it there with save_pretrained."
        ) from error
    backend.model_max_length = 1 << 62  # a longer conversation is ours to cut: no warning
    return backend


def text_completion(document: Document, tokenizer: Tokenizer) -> Rendered:
    """A prompt and its completion, both text, each in tokens of its own; only the completion is learnt."""
    prompt, completion = tokenizer.encode(
        [document.text[: document.prompt_length], document.text[document.prompt_length :]]
    )
    tokens = np.concatenate((prompt, completion, [tokenizer.end_of_document])).astype(np.int64)
    span_bytes = len(document.text[document.prompt_length :].encode())
    return Rendered(tokens, [(max(1, len(prompt)), len(tokens))] if len(completion) else [], span_bytes)


class _PlainChat:
    """The built-in template: the text of a message cannot end it, since no text has the end-of-document token."""

    def __init__(self, tokenizer: Tokenizer, loss_on: LossOn) -> None:
        self.tokenizer, self.loss_on = tokenizer, loss_on

    def ask(self, question: str) -> Prompt:
        end, messages = self.tokenizer.end_of_document, _messages_of_user(question)
        prompt = self.render(Document("train.sample_chat", messages=messages)).tokens.tolist()
        (head,) = self.tokenizer.encode([f"<|{ASSISTANT}|>\n"])
        return Prompt([*prompt, *head.tolist()], [end])

    def render(self, document: Document) -> Rendered:
        messages = document.messages or []
        calls = next((message for message in messages if message.get("tool_calls")), None)
        if document.tools or calls:
            raise BadInput(
                f"{document.name}: the conversation has {'tools' if document.tools else 'tool calls'}, which the "
                "built-in template cannot show. Use a data.tokenizer whose chat template can, or remove them."
            )
        tokens: list[TokenArray] = []
        spans: list[tuple[int, int]] = []
        length = completion = 0
        end = np.array([self.tokenizer.end_of_document])
        for index, message in enumerate(messages):
            head, content = self.tokenizer.encode([f"<|{message['role']}|>\n", message["content"]])
            start, length = length, length + len(head) + len(content) + 1
            if document.prompt_length is None and (self.loss_on == "all" or message["role"] == ASSISTANT):
                learnt = (start + len(head), length) if self.loss_on == "assistant" else (max(start, 1), length)
                spans.append(learnt)
            if index == document.prompt_length:
                completion = start + len(head)
            tokens += [head.astype(np.int64), content.astype(np.int64), end]
        joined = np.concatenate(tokens or [np.zeros(0, np.int64)])
        if document.prompt_length is not None:
            spans = [(completion, length)]
        texts = [self.tokenizer.decode(joined[slice(*span)].tolist()) for span in spans]
        return Rendered(joined, spans, sum(len(text.encode()) for text in texts))


@dataclass(frozen=True)
class _TemplateChat:
    """A Hugging Face tokenizer's chat template, or `template_text` in its place; `origin` is what errors call it."""

    tokenizer: Any
    template_text: str | None
    loss_on: LossOn
    origin: str
    end_of_document: int

    def ask(self, question: str) -> Prompt:
        """An answer ends with the end of a document, or with the special token that follows it in a conversation."""
        answer = "An answer."
        messages = [*_messages_of_user(question), {"role": ASSISTANT, "content": answer}]
        document = Document("train.sample_chat", messages=messages)
        turn = _Conversation(self, document, self.template_for(document))
        following = turn.tokens_of(turn.text.rpartition(answer)[2])
        added = self.tokenizer.added_tokens_decoder
        ends = [token for token in following[:1] if token in added and added[token].special]
        return Prompt(turn.tokens_of(turn.render(messages[:1], prompt=True)), [*ends, self.end_of_document])

    def render(self, document: Document) -> Rendered:
        turn = _Conversation(self, document, self.template_for(document))
        if not document.messages:
            return Rendered(np.zeros(0, np.int64), [], 0)
        turn.check_nothing_is_omitted()
        tokens, spans = turn.learnable(self.loss_on)
        spans = [(max(start, 1), stop) for start, stop in spans if stop > max(start, 1)]
        texts = [self.tokenizer.decode(tokens[slice(*span)], skip_special_tokens=True) for span in spans]
        return Rendered(np.array(tokens, dtype=np.int64), spans, sum(len(text.encode()) for text in texts))

    def template_for(self, document: Document) -> str:
        """The template's text; a tokenizer may have another one for conversations with tools."""
        if self.template_text is not None:
            return self.template_text
        try:
            template: str = self.tokenizer.get_chat_template(None, document.tools)
        except ValueError as error:
            raise BadInput(
                f"{document.name} is a conversation, and the tokenizer has no chat template for it. Set "
                "data.chat_template to a file that holds one, or save the tokenizer with its chat template."
            ) from error
        return template


@dataclass(frozen=True)
class _Conversation:
    """One conversation under one template."""

    chat: _TemplateChat
    document: Document
    template: str

    @cached_property
    def text(self) -> str:
        """The whole conversation."""
        return self.render(self.messages)

    @property
    def messages(self) -> list[Any]:
        return self.document.messages or []

    def render(self, messages: Sequence[Any], prompt: bool = False) -> str:
        """`messages` as text, with `prompt` up to where the assistant begins to write."""
        return self.apply(messages, prompt=prompt)[0]

    def apply(self, messages: Sequence[Any], *, prompt: bool = False, mask: bool = False) -> Marked:
        """As `apply_chat_template` of transformers does it, in a process that can be stopped."""
        request = {
            **self.chat.tokenizer.special_tokens_map,
            "messages": [{key: value for key, value in one.items() if value is not None} for one in messages],
            "tools": self.document.tools,
            "chat_template": self.template,
            "add_generation_prompt": prompt,
            "return_assistant_tokens_mask": mask,
        }
        try:
            return render(request)
        except Failed as error:
            if error.line is not None:  # the template's own, whatever the conversation
                raise BadInput(f"{self.chat.origin} has an error in line {error.line} ({error}). Correct it.") from None
            raise BadInput(
                f"{self.document.name}: {self.chat.origin} does not take this conversation ({error}). Correct the "
                "record, or set data.chat_template to a file with a template that takes it."
            ) from None

    def check_nothing_is_omitted(self) -> None:
        """Some templates pass over roles and tools that they do not know."""
        if self.document.tools and "tools" not in self.template:
            self.refuse_omission("the record's tools")
        for index, message in enumerate(self.messages):
            content = message.get("content", "").strip()
            if content and content not in self.text:
                others = [*self.messages[:index], *self.messages[index + 1 :]]
                try:
                    without = self.render(others) if others else ""
                except BadInput:
                    continue  # so that the message counts
                if without == self.text:
                    self.refuse_omission(f"message {index + 1}, of role {message['role']!r},")

    def refuse_omission(self, what: str) -> None:
        raise BadInput(
            f"{self.document.name}: the chat template leaves out {what} altogether, so it would not be trained on. "
            "Remove it from the record, or set data.chat_template to a file with a template that shows it."
        )

    def learnable(self, loss_on: LossOn) -> tuple[list[int], list[tuple[int, int]]]:
        """All tokens, and the ranges of those to learn."""
        if self.document.prompt_length is not None:
            tokens = self.tokens_of(self.text)
            return tokens, [self.completion(tokens, self.document.prompt_length)]
        if loss_on == "assistant" and GENERATION.search(self.template):
            return self.marked(*self.apply(self.messages, mask=True))
        tokens = self.tokens_of(self.text)
        return tokens, [(0, len(tokens))] if loss_on == "all" else self.turns(tokens)

    def marked(self, text: str, ranges: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of `text`, and the ranges of those that have characters in `ranges`, as transformers counts."""
        encoded = self.chat.tokenizer(text, add_special_tokens=False)
        mask = [0] * len(encoded["input_ids"])
        for start, stop in ranges:
            first = _first_token(encoded, range(start, stop))
            last = _first_token(encoded, range(stop - 1, start - 1, -1))
            if first is not None and last is not None:
                mask[first : last + 1] = [1] * (last + 1 - first)
        return encoded["input_ids"], _spans_of(mask)

    def tokens_of(self, text: str) -> list[int]:
        tokens: list[int] = self.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def turns(self, tokens: list[int]) -> list[tuple[int, int]]:
        """The assistant's turns, from the generation prompt to their end."""
        spans = []
        for index, message in enumerate(self.messages):
            if message["role"] == ASSISTANT:
                if index == 0:
                    self.ambiguous(index, "nothing comes before it, so where its own text begins cannot be told")
                before = self.render(self.messages[:index], prompt=True)
                through = self.render(self.messages[: index + 1])
                spans.append((self.token_count_of(before, tokens, index), self.token_count_of(through, tokens, index)))
        return spans

    def completion(self, tokens: list[int], prompt_length: int) -> tuple[int, int]:
        """What follows the prompt, which ends where the assistant begins to write."""
        return self.token_count_of(self.render(self.messages[:prompt_length], prompt=True), tokens, prompt_length), len(
            tokens
        )

    def token_count_of(self, beginning: str, tokens: list[int], index: int) -> int:
        """How many of `tokens` the text `beginning` is."""
        if not self.text.startswith(beginning):
            self.ambiguous(index, "the template writes what comes before its end differently when more follows")
        before = self.tokens_of(beginning) if beginning != self.text else tokens
        if tokens[: len(before)] != before:
            self.ambiguous(index, "a token runs across its border")
        return len(before)

    def ambiguous(self, index: int, why: str) -> None:
        if self.document.prompt_length is not None:
            raise BadInput(
                f"{self.document.name}: where the completion begins is not certain, in message {index + 1}: {why}. Set "
                "data.chat_template to a file with a template that writes the prompt alike with and without an answer, "
                "or correct the record."
            )
        raise BadInput(
            f"{self.document.name}: which tokens are the assistant's is not certain in message {index + 1}: {why}. Put "
            "{% generation %} and {% endgeneration %} around what the assistant writes, in a copy of the template that "
            "data.chat_template names; or set data.loss_on=all; or correct the record."
        )


def _messages_of_user(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def _first_token(encoded: Any, characters: Iterable[int]) -> int | None:
    """The token of the first of these characters that is in one: tokenizers drop some, such as spaces."""
    tokens = (encoded.char_to_token(0, each) for each in characters)
    return next((token for token in tokens if token is not None), None)


def _spans_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of ones."""
    edges = np.flatnonzero(np.diff(np.array([0, *mask, 0])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
