"""The token cache: every document's token ids in one file, memory-mapped, written once.

    token ids (uint16 or uint32) | padding to 8 | document ends, names' hashes, UTF-8 bytes (8 bytes × 3 ×
    documents) | starts and stops of what is learnt (8 bytes × 2 × spans) | header (JSON) | trailer (24 bytes:
    length and CRC-32 of the header, CRC-32 of all before it, magic)

Where there is no conversation and no pair among the documents, every token is learnt and there are no spans.
The header comes last, so that tokens can be written as they are made. A file counts only when its magic,
sizes, checksums and key are right: it is written under a temporary name, synced, and renamed, so a crash
leaves no half.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from terrazzo.errors import BadInput
from terrazzo.files import replacing
from terrazzo.train.data.chat import Chat, Rendered, text_completion
from terrazzo.train.data.records import ASSISTANT, Document
from terrazzo.train.data.source_file import SourceFile
from terrazzo.train.data.sources import Skipped
from terrazzo.train.data.tokenizer import TokenArray, Tokenizer

__all__ = ["CacheHeader", "TokenCache", "cache_key", "open_cache", "write_cache"]

FORMAT_VERSION = 3
MAGIC = b"TZTOKEN1"
TRAILER = struct.Struct("<QII8s")
DOCUMENTS_PER_ENCODE = 64
CHECK_BYTES = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True)
class CacheHeader:
    """What a cache says of itself. The largest token id first occurs in the document `max_token_document`.

    `conversations` of the documents are, those of pairs among them; `unlearnt` more, the first of them
    `first_unlearnt`, had no token of the assistant and were left out. Of `pairs`, each is two documents in a row, the
    chosen one first; left out were those of two equal texts, or with an empty one.
    """

    version: int
    key: str
    dtype: str
    tokens_numel: int
    documents: int
    max_token: int
    max_token_document: str
    skipped: list[str]
    conversations: int = 0
    unlearnt: int = 0
    first_unlearnt: str = ""
    spans: int = 0
    pairs: int = 0


@dataclass(frozen=True)
class TokenCache:
    """An opened cache. `tokens` is mapped, not read; the arrays per document are in memory.

    Document `i` is `tokens[ends[i - 1] : ends[i]]`, the last of them its end-of-document token if it is text, and
    `text_bytes` is the UTF-8 of what is learnt of it. `spans`, int64 `[spans, 2]`, are the ranges of tokens to learn,
    in order and each within one document; None where that is all of them. `crc` identifies the content.
    """

    header: CacheHeader
    crc: int
    tokens: TokenArray
    ends: npt.NDArray[np.int64]
    name_hashes: npt.NDArray[np.uint64]
    text_bytes: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64] | None = None


def cache_key(files: Sequence[SourceFile], *settings: str | int | None) -> str:
    """A name for what the cache of these inputs holds; files count by place, size and time or tag."""
    description = json.dumps([FORMAT_VERSION, *settings, [file.key for file in files]])
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def write_cache(
    path: Path,
    key: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    skipped: Skipped,
    chat: Callable[[], Chat] | None = None,
) -> CacheHeader | None:
    """Tokenizes `documents` into the file `path`, whole or not at all; None, no file, if there are none.

    Args:
        chat: renders conversations; it is made when the first one comes.

    Raises:
        BadInput: there are conversations only, and none with a turn of the assistant.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=True) as beside:
        beside.touch(0o600)  # the text of others' data is in it
        with beside.open("wb") as file:
            writer = _CacheWriter(file, tokenizer, chat)
            for group in _groups(documents, DOCUMENTS_PER_ENCODE):
                writer.add(group)
            writer.check()
            header = writer.finish(key, skipped.names) if writer.ends else None
        if header is None:
            beside.unlink()
    return header


class _CacheWriter:
    """Writes the parts of a cache in order and keeps what the header will say."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, chat: Callable[[], Chat] | None = None) -> None:
        self.file, self.tokenizer = file, tokenizer
        self.make_chat = chat
        self.chat: Chat | None = None
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.ends, self.name_hashes, self.text_bytes = array("q"), array("Q"), array("q")
        self.tokens_numel, self.crc = 0, 0
        self.max_token, self.max_token_document = -1, ""
        self.spans = array("q")
        self.conversations, self.pairs, self.unlearnt, self.first_unlearnt = 0, 0, 0, ""
        self.roles: Counter[str] = Counter()
        self.has_pairs = False

    def add(self, documents: Sequence[Document]) -> None:
        texts = [document.text for document in documents if not document.is_whole]
        encoded = iter(self.tokenizer.encode(texts) if texts else [])
        for document in documents:
            if document.rejected is not None:
                self.add_pair(document, document.rejected)
            elif document.messages is None:
                ids = np.append(next(encoded).astype(np.int64), self.tokenizer.end_of_document)
                self.put(document, ids, [(0, len(ids))], len(document.text.encode()))
            else:
                self.add_conversation(document)

    def add_conversation(self, document: Document) -> None:
        """Add a conversation; one without anything to learn is counted and left out."""
        rendered = self.render(document)
        if rendered.spans:
            self.conversations += 1
            self.put(document, rendered.tokens, rendered.spans, rendered.span_bytes)
        else:
            self.leave_out(document)
            self.roles.update({message["role"] for message in document.messages or ()})

    def add_pair(self, *documents: Document) -> None:
        """Add both documents of a pair; a pair without anything to learn is counted and left out."""
        self.has_pairs, of_text = True, documents[0].messages is None
        both = [text_completion(one, self.tokenizer) if of_text else self.render(one) for one in documents]
        if all(one.spans for one in both) and not np.array_equal(both[0].tokens, both[1].tokens):
            self.pairs, self.conversations = self.pairs + 1, self.conversations + (0 if of_text else 2)
            for document, one in zip(documents, both, strict=True):
                self.put(document, one.tokens, one.spans, one.span_bytes)
        else:
            self.leave_out(documents[0])

    def render(self, document: Document) -> Rendered:
        if self.chat is None:
            assert self.make_chat is not None, "conversations need a chat template"
            self.chat = self.make_chat()
        return self.chat.render(document)

    def leave_out(self, document: Document) -> None:
        self.unlearnt += 1
        self.first_unlearnt = self.first_unlearnt or document.name

    def put(self, document: Document, ids: TokenArray, spans: list[tuple[int, int]], text_bytes: int) -> None:
        largest = int(ids.max())
        if largest > np.iinfo(self.dtype).max:
            raise BadInput(
                f"{document.name} has the token id {largest}, but tokenizer.json ends at "
                f"{self.tokenizer.vocab_size - 1}: other files in data.tokenizer add tokens to it. Save the tokenizer "
                "again with save_pretrained."
            )
        self.write(ids.astype(self.dtype).tobytes())
        for start, stop in spans:
            self.spans.extend((self.tokens_numel + start, self.tokens_numel + stop))
        self.tokens_numel += len(ids)
        self.ends.append(self.tokens_numel)
        self.name_hashes.append(_name_hash(document.name))
        self.text_bytes.append(text_bytes)
        if largest > self.max_token:
            self.max_token, self.max_token_document = largest, document.name

    def check(self) -> None:
        """Raises `BadInput` when there are conversations or pairs, but nothing to learn."""
        if self.unlearnt and not self.ends:
            if self.has_pairs:
                raise BadInput(
                    f"Of {self.unlearnt:,} preference pairs, from {self.first_unlearnt} on, each has two equal texts "
                    "or an empty completion. Correct them: there is nothing to prefer."
                )
            whose = f"Of {self.unlearnt:,} conversations, from {self.first_unlearnt} on,"
            if ASSISTANT in self.roles:
                raise BadInput(
                    f"{whose} the chat template marks no token as the assistant's. Put {{% generation %}} and "
                    "{% endgeneration %} around what the assistant writes, or remove both."
                )
            raise BadInput(
                f"{whose} none has a turn of the role 'assistant'; their roles are {sorted(self.roles)}. Rename the "
                "role that is to be learnt, or set data.loss_on=all."
            )

    def finish(self, key: str, skipped: list[str]) -> CacheHeader:
        self.write(bytes(_padding_bytes(self.tokens_numel * self.dtype.itemsize)))
        for numbers in (self.ends, self.name_hashes, self.text_bytes):
            self.write(np.asarray(numbers).astype("<u8").tobytes())
        spans = np.asarray(self.spans if self.conversations or self.pairs else [])
        self.write(spans.astype("<u8").tobytes())
        header = CacheHeader(
            version=FORMAT_VERSION,
            key=key,
            dtype=self.dtype.str,
            tokens_numel=self.tokens_numel,
            documents=len(self.ends),
            max_token=self.max_token,
            max_token_document=self.max_token_document,
            skipped=skipped,
            conversations=self.conversations,
            unlearnt=self.unlearnt,
            first_unlearnt=self.first_unlearnt,
            spans=len(spans) // 2,
            pairs=self.pairs,
        )
        content = json.dumps(asdict(header)).encode()
        self.file.write(content)
        self.file.write(TRAILER.pack(len(content), zlib.crc32(content), self.crc, MAGIC))
        return header

    def write(self, content: bytes) -> None:
        self.crc = zlib.crc32(content, self.crc)
        self.file.write(content)


def open_cache(path: Path, key: str, verify: bool) -> TokenCache | None:
    """The cache at `path`; None when there is none, or it is truncated, damaged, or of another key.

    `verify` also reads the whole file to compare its checksum (about a second per GB); sizes are always
    compared.
    """
    try:
        with path.open("rb") as file:
            parts = _read_header(file)
            if parts is None:
                return None
            header, crc, body_bytes = parts
            if header.key != key or body_bytes != _expected_bytes(header):
                return None
            if verify and _checksum(file, body_bytes) != crc:
                return None
    except OSError:
        return None
    tokens = np.memmap(path, dtype=header.dtype, mode="r", shape=(header.tokens_numel,))
    count = 3 * header.documents
    offset = body_bytes - 8 * (count + 2 * header.spans)
    numbers = np.fromfile(path, dtype="<u8", count=count + 2 * header.spans, offset=offset)
    ends, hashes, text_bytes = numbers[:count].reshape(3, header.documents)
    spans = numbers[count:].astype(np.int64).reshape(-1, 2) if header.spans else None
    return TokenCache(header, crc, tokens, ends.astype(np.int64), hashes, text_bytes.astype(np.int64), spans)


def _read_header(file: BinaryIO) -> tuple[CacheHeader, int, int] | None:
    """Header, checksum of the body, and size of the body in bytes; None when they are not all there."""
    size = os.fstat(file.fileno()).st_size
    if size < TRAILER.size:
        return None
    file.seek(size - TRAILER.size)
    length, header_crc, body_crc, magic = TRAILER.unpack(file.read(TRAILER.size))
    body_bytes = size - TRAILER.size - length
    if magic != MAGIC or body_bytes < 0:
        return None
    file.seek(body_bytes)
    content = file.read(length)
    if zlib.crc32(content) != header_crc:
        return None
    values: dict[str, Any] = json.loads(content)
    return (CacheHeader(**values), body_crc, body_bytes) if values.get("version") == FORMAT_VERSION else None


def _expected_bytes(header: CacheHeader) -> int:
    """The size that the body of a cache with this header must have."""
    tokens_bytes = header.tokens_numel * np.dtype(header.dtype).itemsize
    return tokens_bytes + _padding_bytes(tokens_bytes) + 8 * (3 * header.documents + 2 * header.spans)


def _checksum(file: BinaryIO, size: int) -> int:
    """CRC-32 of the first `size` bytes."""
    file.seek(0)
    crc = 0
    while content := file.read(min(CHECK_BYTES, size)):
        crc, size = zlib.crc32(content, crc), size - len(content)
    return crc


def _padding_bytes(size: int) -> int:
    """Bytes up to the next multiple of 8."""
    return -size % 8


def _name_hash(name: str) -> int:
    """64 bits of a document's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive lists of up to `size` items."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
