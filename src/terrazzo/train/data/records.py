"""Files that hold many documents: JSONL (one per line) and parquet (one per row).

A record is a document when it has a `text` field, or `messages`: a list of `{"role": ..., "content": ...}`. A
conversation becomes text by one plain template, each message as

    <|role|>
    content

followed by a line end; the loss is taken on all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import BadInput, did_you_mean

__all__ = ["JSONL_SUFFIXES", "PARQUET_SUFFIXES", "Document", "read_jsonl", "read_parquet", "render_messages"]

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})
MESSAGES_FIELD = "messages"
ROWS_PER_READ = 1024


@dataclass(frozen=True)
class Document:
    """One text. `name` says where it is from: `file`, `file:line` (JSONL) or `file:row` (parquet)."""

    name: str
    text: str


def read_jsonl(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """One document per line; blank lines are passed over.

    Raises:
        BadInput: with file and line, when a line is not UTF-8, not a JSON object, or has neither field.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # both JSON and UTF-8 errors are
                raise BadInput(
                    f"{path}:{number} is not valid JSON ({error}). JSONL holds one complete JSON object per "
                    f"line: correct or delete the line."
                ) from error
            if not isinstance(record, dict):
                raise BadInput(
                    f"{path}:{number} is a JSON {type(record).__name__}, but each line must be an object "
                    f"with a {text_field!r} or {MESSAGES_FIELD!r} field. Correct or delete the line."
                )
            yield Document(f"{name}:{number}", text_of(record, text_field, f"{path}:{number}"))


def read_parquet(path: Path, name: str, text_field: str) -> Iterator[Document]:
    """One document per row, read a few rows at a time; only the needed column is read.

    Raises:
        BadInput: pyarrow is not installed, the file is not parquet, or it has neither column.
    """
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise BadInput(
            f"{str(path)!r} is a parquet file, and reading it needs the package 'pyarrow'. Install the "
            f"extra: pip install 'terrazzo[data]', or convert the file to JSONL."
        ) from error
    try:
        table = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise BadInput(f"{str(path)!r} is not a readable parquet file ({error}). Copy or write it again.") from error
    with table:
        columns = list(table.schema_arrow.names)
        column = next((known for known in (text_field, MESSAGES_FIELD) if known in columns), None)
        if column is None:
            raise BadInput(
                f"{str(path)!r} has no column {text_field!r} or {MESSAGES_FIELD!r}; it has {columns}."
                f"{did_you_mean(text_field, columns)} Set data.text_field to the column that holds the text."
            )
        number = 0
        for batch in table.iter_batches(batch_size=ROWS_PER_READ, columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield Document(f"{name}:{number}", text_of({column: value}, text_field, f"{path}:{number}"))


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of one record, which is at `where`."""
    if text_field in record:
        text = record[text_field]
        if not isinstance(text, str):
            raise BadInput(
                f"{where}: field {text_field!r} is {type(text).__name__} ({str(text)[:40]!r}), but must be a "
                f"string. Correct the record, or set data.text_field to the field that holds the text."
            )
        return encodable(text, where)
    if MESSAGES_FIELD in record:
        return encodable(render_messages(record[MESSAGES_FIELD], where), where)
    raise BadInput(
        f"{where}: the record has neither a {text_field!r} nor a {MESSAGES_FIELD!r} field; it has "
        f"{sorted(record)}.{did_you_mean(text_field, record)} Rename the field, or set data.text_field to "
        "its name."
    )


def render_messages(messages: Any, where: str) -> str:
    """A conversation as text, by the template in this module's docstring."""
    if not isinstance(messages, list):
        raise BadInput(
            f"{where}: field {MESSAGES_FIELD!r} is {type(messages).__name__}, but must be a list of objects "
            f"with a 'role' and a 'content'. Correct the record."
        )
    return "".join(render_message(message, where) for message in messages)


def render_message(message: Any, where: str) -> str:
    """One message; its content is a string, or a list of `{"type": "text", "text": ...}` parts."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadInput(
            f"{where}: the message {str(message)[:80]!r} does not have a 'role' and a 'content' that are "
            f"strings. Correct the record; only text can be trained on."
        )
    return f"<|{role}|>\n{content}\n"


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
