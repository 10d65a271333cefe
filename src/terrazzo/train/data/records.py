"""Files that hold many documents: JSONL (one per line), JSON (a list of them, or as JSONL) and parquet (one per row).

A record is a document when it has a `text` field, or `messages`: a list of `{"role": ..., "content": ...}`, perhaps
with `tools` beside it. `chat` turns a conversation into tokens. `pair_records` has the form of preference pairs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, Protocol

from terrazzo.errors import BadInput
from terrazzo.messages import did_you_mean, install
from terrazzo.train.data.source_file import COMPRESSIONS, SourceFile

__all__ = [
    "ASSISTANT",
    "ROWS_PER_READ",
    "TOOLS_FIELD",
    "Document",
    "Message",
    "RecordForm",
    "TextRecords",
    "encodable",
    "is_json",
    "is_jsonl",
    "is_parquet",
    "messages_of",
    "opened",
    "read_json",
    "read_jsonl",
    "read_parquet",
    "record_of",
    "tools_of",
]

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
JSON_SUFFIX = ".json"
PARQUET_SUFFIX = ".parquet"
MESSAGES_FIELD, TOOLS_FIELD = "messages", "tools"
ASSISTANT = "assistant"
ROWS_PER_READ = 1024


Message = dict[str, Any]
"""One message of a conversation: `role`, `content` and whatever else a chat template may look at."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation. `name` says where it is from: `file`, `file:line` or `file:row`.

    A preference pair is the chosen one, which has the `rejected` one. Of each the first `prompt_length` characters, or
    messages, are the prompt.
    """

    name: str
    text: str = ""
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    prompt_length: int | None = None
    rejected: Document | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it may not be cut: only plain text may."""
        return self.messages is not None or self.rejected is not None

    @property
    def size_bytes(self) -> int:
        """UTF-8 bytes of the text, or of all messages' contents; of a pair, of both."""
        contents = [message.get("content", "") for message in self.messages] if self.messages else [self.text]
        return sum(len(content.encode()) for content in contents) + (self.rejected.size_bytes if self.rejected else 0)


class RecordForm(Protocol):
    """Which records are documents, and how they are read."""

    @property
    def description(self) -> str:
        """The fields that are needed, for an error."""

    def check_text(self, where: str) -> None:
        """Raise `BadInput` if a whole file of text is not a document of this form."""

    def columns(self, columns: list[str], where: str) -> list[str]:
        """The columns that are needed of a table; raises `BadInput` if some are missing."""

    def document(self, record: dict[str, Any], name: str, where: str) -> Document:
        """The document `name` that one record holds; the record is at `where`."""


@dataclass(frozen=True)
class TextRecords:
    """Records of the field `text_field`, or of `messages`."""

    text_field: str = "text"

    @property
    def description(self) -> str:
        return f"a {self.text_field!r} or {MESSAGES_FIELD!r} field"

    def check_text(self, where: str) -> None:
        """Any text is a document."""

    def columns(self, columns: list[str], where: str) -> list[str]:
        """The column of texts, or of messages and of tools if it has one; raises `BadInput` for neither or both."""
        self._check_one(columns, where)
        column = next((known for known in (self.text_field, MESSAGES_FIELD) if known in columns), None)
        if column is None:
            raise BadInput(
                f"{where!r} has no column {self.text_field!r} or {MESSAGES_FIELD!r}; it has {columns}."
                f"{did_you_mean(self.text_field, columns)} Set data.text_field to the column that holds the text"
                f"{_if_pairs(columns)}."
            )
        return [column, *({TOOLS_FIELD} & set(columns) if column == MESSAGES_FIELD else ())]

    def document(self, record: dict[str, Any], name: str, where: str) -> Document:
        """The text or the conversation."""
        self._check_one(record, where)
        if self.text_field in record:
            text = record[self.text_field]
            if not isinstance(text, str):
                raise BadInput(
                    f"{where}: field {self.text_field!r} is {type(text).__name__} ({str(text)[:40]!r}), but must be a "
                    f"string. Correct the record, or set data.text_field to the field that holds the text."
                )
            return Document(name, encodable(text, where))
        if MESSAGES_FIELD in record:
            messages = messages_of(record[MESSAGES_FIELD], MESSAGES_FIELD, where)
            return Document(name, messages=messages, tools=tools_of(record.get(TOOLS_FIELD), where))
        raise BadInput(
            f"{where}: the record has neither a {self.text_field!r} nor a {MESSAGES_FIELD!r} field; it has "
            f"{sorted(record)}.{did_you_mean(self.text_field, record)} Rename the field, or set data.text_field to "
            f"its name{_if_pairs(record)}."
        )

    def _check_one(self, fields: Collection[str], where: str) -> None:
        """Raise `BadInput` for both a text and a conversation in one record: only one could be learnt."""
        if self.text_field != MESSAGES_FIELD and self.text_field in fields and MESSAGES_FIELD in fields:
            raise BadInput(
                f"{where} has both {self.text_field!r} and {MESSAGES_FIELD!r}. To learn the conversations, set "
                f"data.text_field to a name that is not there, such as 'no-text'; to learn the text, remove "
                f"{MESSAGES_FIELD!r}."
            )


def _if_pairs(fields: Collection[str]) -> str:
    """The edit for preference pairs."""
    return "; for preference pairs, set objective=dpo" if {"chosen", "rejected"} <= set(fields) else ""


def is_jsonl(name: str) -> bool:
    """Whether a file is JSONL by its suffix, which a compression's may follow."""
    return _suffix(name) in JSONL_SUFFIXES


def is_json(name: str) -> bool:
    """Whether a file is JSON by its suffix, which a compression's may follow."""
    return _suffix(name) == JSON_SUFFIX


def _suffix(name: str) -> str:
    path = PurePath(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def is_parquet(name: str) -> bool:
    """Whether a file is parquet by its suffix."""
    return name.lower().endswith(PARQUET_SUFFIX)


def read_jsonl(file: SourceFile, form: RecordForm) -> Iterator[Document]:
    """One document per line; blank lines are passed over.

    Raises:
        BadInput: with file and line, when a line is not UTF-8, not a JSON object, or lacks the fields.
    """
    with opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file.where}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are the former
                raise BadInput(
                    f"{where} is not valid JSON ({error}). JSONL holds one complete JSON object per "
                    f"line: correct or delete the line."
                ) from error
            if not isinstance(record, dict):
                raise BadInput(
                    f"{where} is a JSON {type(record).__name__}, but each line must be an object "
                    f"with {form.description}. Correct or delete the line."
                )
            yield form.document(record, f"{file.name}:{number}", where)


def read_json(file: SourceFile, content: bytes, form: RecordForm) -> Iterator[Document]:
    """One document per entry of the list that is a file's `content`, or per line where its first line is an object.

    Raises:
        BadInput: before the first document, where it holds something else; of a file that was merely found, also where
            its first record lacks the fields.
    """
    first = _object_in(next((line for line in content.split(b"\n") if line.strip()), b""))
    if first is not None:
        _check_found(file, form, first)
        return read_jsonl(file, form)
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file.where!r} is not valid JSON ({error}): correct it.") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise BadInput(
            f"{file.where!r} must hold a list of objects with {form.description}, or one such object per line: save its"
            " records so. To learn it as the text that it is, let its name end in .txt."
        )
    if records:
        _check_found(file, form, records[0])
    numbered = enumerate(records, start=1)
    return (form.document(record, f"{file.name}:{number}", f"{file.where}:{number}") for number, record in numbered)


def _object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object that the whole line is; None if it is none."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _check_found(file: SourceFile, form: RecordForm, first: dict[str, Any]) -> None:
    """Raise `BadInput` if a file found in a folder lacks the fields in its first record: it is some other JSON."""
    if not file.required:
        form.columns(list(first), file.where)


def opened(file: SourceFile) -> BinaryIO:
    """A file's bytes, decompressed as its suffix says."""
    try:
        return file.open(file.compression)
    except ImportError as error:
        raise _needs_pyarrow(file, "a file compressed with Zstandard") from error


def read_parquet(file: SourceFile, form: RecordForm) -> Iterator[Document]:
    """One document per row, read a few rows at a time; only the needed columns are read.

    Raises:
        BadInput: pyarrow is not installed, the file is not parquet, or it lacks the columns.
    """
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise _needs_pyarrow(file, "a parquet file") from error
    try:
        table = parquet.ParquetFile(file.path, filesystem=file.fs)
    except ArrowInvalid as error:
        raise BadInput(f"{file.where!r} is not a readable parquet file ({error}). Copy or write it again.") from error
    with table:
        needed = form.columns(list(table.schema_arrow.names), file.where)
        number = 0
        for batch in table.iter_batches(batch_size=ROWS_PER_READ, columns=needed):
            for row in batch.to_pylist():
                number += 1
                where = f"{file.where}:{number}"
                yield form.document(record_of(row), f"{file.name}:{number}", where)


def _needs_pyarrow(file: SourceFile, what: str) -> BadInput:
    return BadInput(
        f"{file.where!r} is {what}, and reading it needs the package 'pyarrow'. {install('data')}, or convert the file "
        "to JSONL."
    )


def record_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as JSON has it, without the nulls that a table puts for fields which other structs have."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def messages_of(messages: Any, field: str, where: str) -> list[Message]:
    """The messages of a conversation, the value of a field, their contents as strings."""
    if not isinstance(messages, list):
        raise BadInput(
            f"{where}: field {field!r} is {type(messages).__name__}, but must be a list of objects "
            f"with a 'role' and a 'content'. Correct the record."
        )
    checked = [_message_of(message, where) for message in messages]
    encodable(json.dumps(checked, ensure_ascii=False, default=str), where)
    return checked


def _message_of(message: Any, where: str) -> Message:
    """One message; its content is a string, a list of `{"type": "text", "text": ...}` parts, or tool calls instead."""
    fields = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):  # else content stays a list, and is refused
            content = "".join(texts)
    if content is None and fields.get("tool_calls") and isinstance(role, str):
        _check_role(role, where)
        return fields  # templates tell a missing content from an empty one
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadInput(
            f"{where}: the message {str(message)[:80]!r} does not have a 'role' and a 'content' that are "
            f"strings. Correct the record; only text can be trained on."
        )
    _check_role(role, where)
    return {**fields, "content": content}


def _check_role(role: str, where: str) -> None:
    """Raise `BadInput` for a role that is almost the assistant's, and would not be learnt. Others are fine."""
    if role != ASSISTANT and (meant := did_you_mean(role.strip().lower(), [ASSISTANT])):
        raise BadInput(f"{where}: a message has the role {role!r}.{meant} Correct it: other roles are not learnt.")


def tools_of(tools: Any, where: str) -> list[Any] | None:
    """The tools that the assistant may call; None for none."""
    if isinstance(tools, str):  # datasets often keep schemas, which differ in form, as JSON text
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = {}
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadInput(f"{where}: field {TOOLS_FIELD!r} must be a list of JSON schemas, or text of one. Correct it.")
    return tools or None


def encodable(text: str, where: str) -> str:
    """The text itself; JSON can spell half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{where}: the text has a lone surrogate (\\u{ord(text[error.start]):04x} at character "
            f"{error.start}), which UTF-8 cannot hold. Correct or delete the record."
        ) from error
    return text
