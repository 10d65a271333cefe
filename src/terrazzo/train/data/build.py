"""`load_data`: from a `DataSpec` to training and validation sequences, through the token cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import BadInput
from terrazzo.train.data.cache import TokenCache, cache_key, open_cache, write_cache
from terrazzo.train.data.sequences import SequenceDataset, split_documents
from terrazzo.train.data.sources import Skipped, find_files, read_documents
from terrazzo.train.data.tokenizer import BYTES, Tokenizer, load_tokenizer

__all__ = ["Agree", "DataSpec", "TokenData", "default_cache_dir", "load_data"]

Agree = Callable[[str | None], str | None]
"""Called once by every rank with its error message or None; returns to all of them one rank's message, or
None when none has any. It must not return before every rank has called it."""


@dataclass(frozen=True)
class DataSpec:
    """What to train on.

    `source` and `validation_source` are files, folders, globs or `python-stdlib` (see `sources`). Without a
    `validation_source`, `validation_fraction` of the tokens is held out. `max_bytes` caps the text of each
    source.
    """

    source: str | Sequence[str]
    sequence_length: int = 256
    tokenizer: str = BYTES
    end_of_document: str | None = None
    text_field: str = "text"
    max_bytes: int | None = None
    validation_source: str | Sequence[str] | None = None
    validation_fraction: float = 0.05
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise BadInput(f"sequence_length is {self.sequence_length}; give at least 1 token.")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise BadInput(f"data.max_bytes is {self.max_bytes}; give at least 1, or leave it out for no cap.")
        if not 0.0 <= self.validation_fraction < 0.5:
            raise BadInput(
                f"data.validation_fraction is {self.validation_fraction}; give a share from 0 (no "
                f"validation) up to, not including, 0.5."
            )


@dataclass(frozen=True)
class TokenData:
    """The sequences to train on and, if any, to validate on. `skipped` names files that are not text."""

    train: SequenceDataset
    validation: SequenceDataset | None
    tokenizer: Tokenizer
    skipped: Skipped

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises BadInput when the model's `vocab_size` has no row for some token of the data."""
        for dataset in (self.train, self.validation):
            if dataset is not None and dataset.cache.header.max_token >= vocab_size:
                header = dataset.cache.header
                raise BadInput(
                    f"The data holds token id {header.max_token} (first in document "
                    f"{header.max_token_document!r}), but the model's vocabulary has ids 0 to "
                    f"{vocab_size - 1} only. Set model.vocab_size to at least "
                    f"{max(header.max_token + 1, self.tokenizer.vocab_size)}, or use the model's own "
                    "tokenizer."
                )


def load_data(spec: DataSpec, *, builds: bool = True, agree: Agree = lambda message: message) -> TokenData:
    """Tokenizes what `spec` names, unless the cache has it, and opens it.

    Args:
        builds: True on exactly one rank of each group of ranks that share a file system. More do no harm: they
            repeat the work and write the same file. The others wait in `agree`.
        agree: how this rank's failure reaches all; the default is that of a single process.

    Raises:
        BadInput: on every rank, when any rank cannot use its input.
    """
    failure: Exception | None = None
    try:
        tokenizer = load_tokenizer(spec.tokenizer, spec.end_of_document)
        places = [cache_place(spec, source, tokenizer) for source in sources_of(spec)]
        if builds:
            for source, path in places:
                build_if_needed(spec, source, path, tokenizer)
    except Exception as error:  # whatever it is, the other ranks must hear of it before this one leaves
        failure = error
    message = agree(None if failure is None else f"{failure}")
    if failure is not None:
        raise failure
    if message is not None:
        raise BadInput(message)
    return assemble(spec, tokenizer, [opened(path) for _, path in places])


def sources_of(spec: DataSpec) -> list[str | Sequence[str]]:
    """The sources that get a cache each: training and, if it has its own, validation."""
    return [spec.source] if spec.validation_source is None else [spec.source, spec.validation_source]


def cache_place(spec: DataSpec, source: str | Sequence[str], tokenizer: Tokenizer) -> tuple[str | Sequence[str], Path]:
    """The source and the file that its cache has."""
    key = cache_key(find_files(source), tokenizer, spec.text_field, spec.max_bytes)
    folder = Path(spec.cache).expanduser() if spec.cache is not None else default_cache_dir()
    return source, folder / f"{key}.tokens"


def default_cache_dir() -> Path:
    """`terrazzo/tokens` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terrazzo" / "tokens"


def build_if_needed(spec: DataSpec, source: str | Sequence[str], path: Path, tokenizer: Tokenizer) -> None:
    """Writes the cache `path`, unless a whole and undamaged one is there."""
    if open_cache(path, path.stem, verify=True) is not None:
        return
    skipped = Skipped()
    documents = read_documents(find_files(source), spec.text_field, spec.max_bytes, skipped)
    try:
        written = write_cache(path, path.stem, documents, tokenizer, skipped)
    except OSError as error:
        raise BadInput(
            f"Making the token cache of data.source {source!r} in {str(path.parent)!r} failed: {error}. Make "
            "the data readable and the folder writable with room for 2 or 4 bytes per token, or set "
            "data.cache to another."
        ) from error
    if written is None:
        raise BadInput(
            f"data.source {source!r} holds no text at all ({skipped}). Point it at files that hold UTF-8 "
            f"text, JSONL or parquet."
        )


def opened(path: Path) -> TokenCache:
    """The cache that some rank has just built or checked."""
    cache = open_cache(path, path.stem, verify=False)
    if cache is None:
        raise BadInput(
            f"The token cache {str(path)!r} that another rank made is not visible to this rank. Either the "
            "data files differ between machines or have just changed (their paths, sizes and times name the "
            f"cache), or data.cache is not shared: let one rank of each machine build it."
        )
    return cache


def assemble(spec: DataSpec, tokenizer: Tokenizer, caches: list[TokenCache]) -> TokenData:
    """The datasets of the opened caches: one to be split, or training and validation."""
    train_split, held_out = split_documents(caches[0], 0.0 if len(caches) == 2 else spec.validation_fraction)
    train = SequenceDataset(caches[0], train_split, spec.sequence_length, tokenizer.end_of_document)
    validation = None
    if len(caches) == 2:
        whole, _ = split_documents(caches[1], 0.0)
        validation = SequenceDataset(caches[1], whole, spec.sequence_length, tokenizer.end_of_document)
    elif held_out is not None:
        validation = SequenceDataset(caches[0], held_out, spec.sequence_length, tokenizer.end_of_document)
    if validation is not None and len(validation) == 0:
        validation = None  # a single held-out token predicts nothing
    return TokenData(train, validation, tokenizer, Skipped([name for cache in caches for name in cache.header.skipped]))
