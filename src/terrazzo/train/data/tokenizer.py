"""From text to token ids and back: built-in bytes, or any Hugging Face tokenizer in a local folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from terrazzo.errors import BadInput
from terrazzo.messages import install
from terrazzo.untrusted_files import check_model_file, read_json

__all__ = [
    "BYTES",
    "MAX_BYTES",
    "ByteTokenizer",
    "TokenArray",
    "Tokenizer",
    "check_files",
    "load_tokenizer",
    "missing_extra",
]

BYTES = "bytes"
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
# Tried in this order when a folder does not say which token ends a document.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")

FEWEST_TOKENS = 16
MAX_BYTES = 1 << 28  # of one file; the largest vocabularies have some 30 MB
READ_BY_LIBRARIES = (  # no more than that: data may lie beside, in files of any size such as tokens.bin
    *("*config*.json", "*token*.json", "*vocab*.json", "*vocab*.txt", "*merges*.txt", "dict.txt", "tekken.json"),
    *("byte_maps.json", "emoji.json", "normalizer.json", "word_*.json", "chat_template*.json", "chat_template*.jinja"),
    *("*.model", "tokenizer.model.*", "*.tokenizer", "*.spm", "*.tiktoken", "*.bpe", "*.codes"),
    "additional_chat_templates/*.jinja",
)

TokenArray = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What the data pipeline needs. `fingerprint` changes whenever the ids of some text would."""

    fingerprint: str
    vocab_size: int
    end_of_document: int

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """The ids of each text, without any special token added."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; an end of document gives nothing, and what is not valid text gives U+FFFD."""


class ByteTokenizer:
    """UTF-8 bytes as token ids 0 to 255, and 256 as the end of a document."""

    fingerprint = BYTES
    vocab_size = 257
    end_of_document = 256

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < self.end_of_document).decode(errors="replace")


class _HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`. Text that looks like a special token is encoded as plain text."""

    def __init__(self, backend: Any, fingerprint: str, end_of_document: int) -> None:
        self.backend = backend
        self.fingerprint = fingerprint
        self.end_of_document = end_of_document
        # By the largest id, not by count: ids may have holes.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.backend.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer called `"bytes"`, or the one in a local folder or tokenizer.json file.

    A folder without tokenizer.json is converted by `transformers`. `end_of_document` names the token that
    ends a document; by default the folder's `eos_token`, else the first usual one that the vocabulary has.

    Raises:
        BadInput: no such path, the extra is not installed, an unreadable tokenizer, or no end-of-document
            token.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists():
        raise BadInput(
            f"data.tokenizer {name!r} is neither '{BYTES}' nor an existing path. Give a local folder that "
            f"holds a {TOKENIZER_FILE}; tokenizers are never downloaded."
        )
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if path.is_dir():
        check_files(path)
    else:  # its folder may hold anything; of that, only what states the end is read
        for one in (path, path.parent / SETTINGS_FILE):
            if os.path.lexists(one):
                check_model_file(one, MAX_BYTES)
    backend = _read_backend(file) if file.is_file() else _convert_backend(path)
    content = backend.to_str()
    end = _find_end(backend, end_of_document or _stated_end(file.parent), name)
    return _HuggingFaceTokenizer(backend, f"{hashlib.sha256(content.encode()).hexdigest()}:{end}", end)


def check_files(folder: Path) -> None:
    """Raise `BadInput` for a file that a tokenizer's library would read and that it cannot read to an end."""
    files = [path for pattern in READ_BY_LIBRARIES for path in folder.glob(pattern)]
    for path in sorted(files):
        if not path.is_dir():
            check_model_file(path, MAX_BYTES, folder)


def _read_backend(file: Path) -> Any:
    """The `tokenizers.Tokenizer` in a tokenizer.json."""
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise missing_extra("tokenizers") from error
    try:
        return Backend.from_file(str(file))
    except BaseException as error:  # the library raises bare Exception, and a panic in it is none
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = str(error)[:300]
        raise BadInput(f"{str(file)!r} is not a readable tokenizer ({reason}). Save it again.") from error


def _convert_backend(folder: Path) -> Any:
    """The fast tokenizer that `transformers` makes from older files (merges.txt, SentencePiece)."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
        if backend.get_vocab_size(with_added_tokens=True) < FEWEST_TOKENS:  # it found no vocabulary, and says nothing
            raise ValueError("it finds no vocabulary in them")
        return backend
    except Exception as error:  # many kinds, by what is missing in the folder
        raise BadInput(
            f"The folder {str(folder)!r} holds no {TOKENIZER_FILE} and transformers cannot make a tokenizer "
            f"from its other files ({error}). Save it there with save_pretrained."
        ) from error


def missing_extra(package: str) -> BadInput:
    """The error for a package that is not installed."""
    return BadInput(
        f"A Hugging Face tokenizer was asked for, but the package {package!r} is not installed. {install('hf')}, or"
        f" set data.tokenizer to '{BYTES}'."
    )


def _stated_end(folder: Path) -> str | None:
    """The `eos_token` that a tokenizer's folder states, if it does."""
    try:
        values = read_json(folder / SETTINGS_FILE, MAX_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(values, dict):
        raise BadInput(f"'{folder / SETTINGS_FILE}' holds a JSON {type(values).__name__}, expected an object.")
    value = values.get("eos_token")
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _find_end(backend: Any, stated: str | None, name: str) -> int:
    """The id of the end-of-document token."""
    for token in (stated,) if stated else END_TOKENS:
        index = backend.token_to_id(token)
        if index is not None:
            return int(index)
    wanted = f"has no token {stated!r}" if stated else f"states no eos_token and has none of {list(END_TOKENS)}"
    raise BadInput(
        f"The tokenizer {name!r} {wanted}, so documents cannot be told apart. Set data.end_of_document to a "
        f"token of its vocabulary."
    )
