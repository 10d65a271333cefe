"""`load_data`: from `data.source` to training and validation sequences, through the token cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from terrazzo.config import Config, DataConfig, without_passwords
from terrazzo.errors import BadInput
from terrazzo.files import cache_folder
from terrazzo.train.data.cache import CacheHeader, TokenCache, cache_key, open_cache, write_cache
from terrazzo.train.data.chat import chat_fingerprint, load_chat
from terrazzo.train.data.packing import Packing, arrange
from terrazzo.train.data.pair_records import PairRecords
from terrazzo.train.data.pairs import PairDataset, arrange_pairs, held_out_pairs
from terrazzo.train.data.records import RecordForm, TextRecords
from terrazzo.train.data.sequences import (
    SequenceDataset,
    Split,
    cut_at_documents,
    held_out_whole,
    split_documents,
    split_of,
)
from terrazzo.train.data.source_file import SourceFile
from terrazzo.train.data.sources import Skipped, find_files, read_documents
from terrazzo.train.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["TokenData", "check_too_long", "load_data"]

T = TypeVar("T")


class Together(Protocol):
    """Does this rank's `work`, and returns once every rank has done its own; a failure of one is raised on all."""

    def __call__(self, work: Callable[[], T]) -> T: ...


def _alone(work: Callable[[], T]) -> T:
    return work()


@dataclass(frozen=True)
class TokenData:
    """The sequences to train on and, if any, to validate on. `skipped` names files that are not text.

    `notes` has a line of what became of the conversations of each cache, where there are any. `files` are those that
    the training data were made of.
    """

    train: SequenceDataset
    validation: SequenceDataset | None
    tokenizer: Tokenizer
    skipped: Skipped
    notes: tuple[str, ...] = ()
    files: tuple[SourceFile, ...] = ()

    @property
    def described(self) -> dict[str, str]:
        """Texts that ranks compare: equal for equal samples, whatever files these came from."""
        parts = {"training data": self.train, "validation data": self.validation}
        texts = {
            name: "none" if part is None else f"{part.tokens_numel:,} tokens, fingerprint {part.fingerprint}"
            for name, part in parts.items()
        }
        return texts | {"tokenizer": self.tokenizer.fingerprint}

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


def load_data(
    config: Config, *, builds: bool = True, together: Together = _alone, say: Callable[[str], None] | None = None
) -> TokenData:
    """Tokenizes what section `data` names, unless the cache has it, and opens it.

    Args:
        builds: True on exactly one rank of each group of ranks that share a file system. More do no harm: they
            repeat the work and write the same file. The others wait in `together`.
        together: how this rank's failure reaches all; the default is that of a single process.
        say: is told what takes long.

    Raises:
        BadInput: on every rank, when any rank cannot use its input.
    """

    def made() -> tuple[Tokenizer, list[_WantedCache]]:
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
        wanted = [_wanted_cache(config, source, tokenizer) for source in _sources_of(config.data)]
        if builds:
            for one in wanted:
                _build_if_needed(config, one, tokenizer, say)
        return tokenizer, wanted

    tokenizer, wanted = together(made)
    data = together(lambda: _assemble(config, tokenizer, [_opened(one.path) for one in wanted]))
    return replace(data, files=tuple(wanted[0].files))


def _sources_of(data: DataConfig) -> list[str | Sequence[str]]:
    """The sources that get a cache each: training and, if it has its own, validation."""
    return [data.source] if data.validation_source is None else [data.source, data.validation_source]


class _WantedCache(NamedTuple):
    """The cache of a source: its own path, and the files that go into it, as they were found when it was named."""

    source: str | Sequence[str]
    files: list[SourceFile]
    path: Path


def _wanted_cache(config: Config, source: str | Sequence[str], tokenizer: Tokenizer) -> _WantedCache:
    """The cache that a source has as it is now."""
    data, of_pairs = config.data, ["pairs"] if config.objective.kind.of_pairs else []
    chat, files = chat_fingerprint(data.tokenizer, data.chat_template, data.loss_on), find_files(source)
    key = cache_key(files, tokenizer.fingerprint, data.text_field, data.max_bytes, chat, *of_pairs)
    folder = Path(data.cache).expanduser() if data.cache is not None else cache_folder("tokens")
    return _WantedCache(source, files, folder / f"{key}.tokens")


def _build_if_needed(
    config: Config, wanted: _WantedCache, tokenizer: Tokenizer, say: Callable[[str], None] | None
) -> None:
    """Writes the cache, unless a whole and undamaged one is there."""
    source, files, path = wanted
    data = config.data
    form: RecordForm = PairRecords() if config.objective.kind.of_pairs else TextRecords(data.text_field)
    if open_cache(path, path.stem, verify=True) is not None:
        return
    if say is not None:
        named = source if isinstance(source, str) else ", ".join(source)
        say(f"tokenising {without_passwords(named)} ...")
    skipped = Skipped()
    documents = read_documents(files, form, data.max_bytes, skipped)
    try:
        chat = partial(load_chat, tokenizer, data.tokenizer, data.chat_template, data.loss_on)
        written = write_cache(path, path.stem, documents, tokenizer, skipped, chat)
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


def _opened(path: Path) -> TokenCache:
    """The cache that some rank has just built or checked."""
    cache = open_cache(path, path.stem, verify=False)
    if cache is None:
        raise BadInput(
            f"The token cache {str(path)!r} that another rank made is not visible to this rank. Either the "
            "data files differ between machines or have just changed (their paths, sizes and times name the "
            f"cache), or data.cache is not shared: let one rank of each machine build it."
        )
    return cache


def _assemble(config: Config, tokenizer: Tokenizer, caches: list[TokenCache]) -> TokenData:
    """The datasets of the opened caches: one to be split, or training and validation."""
    data, end = config.data, tokenizer.end_of_document
    if data.chat_template is not None and not any(cache.header.conversations for cache in caches):
        raise BadInput(
            f"data.chat_template is '{data.chat_template}', but no record of data.source has 'messages', so nothing "
            "would be rendered with it. Remove it, or give conversations."
        )
    if config.model.attention.prefix and not any(cache.spans is not None for cache in caches):
        raise BadInput(
            "model.attention.prefix is of the prompts of conversations, and no record of data.source has 'messages'."
            " Remove it, or give conversations."
        )
    packing: list[Packing] = ["single" if cache.header.pairs else _packing_of(data, cache) for cache in caches]
    train, validation = _datasets(
        config, caches[0], packing[0], 0.0 if len(caches) == 2 else data.validation_fraction, end
    )
    notes = _notes_of(caches[0].header, {"training": train, "validation": validation})
    if len(caches) == 2:
        validation, _ = _datasets(config, caches[1], packing[1], 0.0, end)
        notes += _notes_of(caches[1].header, {"validation": validation})
    if data.attention == "document" and "single" in packing:
        notes += ("data.attention 'document' does nothing where each sequence has one document: remove it",)
    skipped = Skipped([name for cache in caches for name in cache.header.skipped])
    _check_learns(config, "training", train)
    if validation is not None and (len(caches) == 2 or validation.rows is not None):
        _check_learns(config, "validation", validation)
    if validation is not None and not validation.targets_numel:  # a single token, which predicts nothing
        validation = None
    if validation is None and data.validation_fraction:
        share = f"data.validation_fraction is {data.validation_fraction:g}"
        edit = "Raise it, give more data, or set it to 0"
        notes += (f"{share}, and so small a part of the data has no token to learn: there is no validation. {edit}",)
    return TokenData(train, validation, tokenizer, skipped, notes)


def _packing_of(data: DataConfig, cache: TokenCache) -> Packing:
    """The packing as configured, or the default for what the cache holds."""
    if data.packing is None and 0 < cache.header.conversations < cache.header.documents:
        raise BadInput(
            f"data.source holds {cache.header.conversations:,} conversations and "
            f"{cache.header.documents - cache.header.conversations:,} texts, which are packed differently by default. "
            "Set data.packing: 'stream' cuts both where a sequence ends, 'whole' and 'single' keep each in one."
        )
    packing: Packing = data.packing or ("single" if cache.header.conversations else "stream")
    check_too_long(data, packing)
    return packing


def check_too_long(data: DataConfig, packing: Packing) -> None:
    """Raise `BadInput` where documents that are too long are to be dropped, and with this packing none are."""
    if packing == "stream" and data.too_long == "drop":
        raise BadInput(
            "data.too_long is 'drop', but with data.packing 'stream', the default for text, documents are cut wherever "
            "a sequence ends. Leave data.too_long out, or set data.packing to 'whole' or 'single'."
        )


def _check_learns(config: Config, part: str, dataset: SequenceDataset) -> None:
    """Raises `BadInput` for sequences without any target."""
    if dataset.targets_numel:
        return
    rows = dataset.rows
    dropped, cut = (0, 0) if rows is None else (rows.dropped, rows.cut_unlearnt + rows.cut_equal)
    why = f": {dropped:,} documents are longer" if dropped else f": {cut:,} documents are cut before it" if cut else ""
    raise BadInput(
        f"The {part} data have no token to learn in sequences of {config.batch.sequence_length} tokens{why}. Raise "
        f"batch.sequence_length, {'set data.too_long=truncate, ' if dropped else ''}or give more data."
    )


def _datasets(
    config: Config, cache: TokenCache, packing: Packing, fraction: float, end: int
) -> tuple[SequenceDataset, SequenceDataset | None]:
    """The sequences of a cache, and those of `fraction` of its tokens that are held out."""
    if packing == "stream":
        train, validation = (
            None if split is None else _in_a_stream(config, cache, split, end)
            for split in split_documents(cache, fraction)
        )
    else:
        chosen = held_out_pairs(cache, fraction) if cache.header.pairs else held_out_whole(cache, fraction)
        train = _in_rows(config, cache, packing, ~chosen, end)
        validation = _in_rows(config, cache, packing, chosen, end) if chosen.any() else None
    assert train is not None
    for dataset in (train, *([] if validation is None else [validation])):
        dataset.prompted = config.model.attention.prefix
    return train, validation


def _in_a_stream(config: Config, cache: TokenCache, split: Split, end: int) -> SequenceDataset:
    """The documents one after the other."""
    apart = config.cuts_attention
    split = cut_at_documents(cache, split) if apart else split
    return SequenceDataset(cache, split, config.batch.sequence_length, end, apart=apart)


def _in_rows(
    config: Config, cache: TokenCache, packing: Packing, chosen: npt.NDArray[np.bool_], end: int
) -> SequenceDataset:
    """The chosen documents, each in one sequence."""
    length, too_long = config.batch.sequence_length, config.data.too_long
    if cache.header.pairs:
        room = length + (not config.objective.kind.scored)  # a score is read where the last token goes in
        rows = arrange_pairs(cache, chosen, room, too_long)
        return PairDataset(cache, split_of(cache, chosen), length, end, rows)
    rows = arrange(cache, chosen, length + 1, packing, too_long)
    apart = config.cuts_attention and packing == "whole"
    return SequenceDataset(cache, split_of(cache, chosen), length, end, rows, apart)


def _notes_of(header: CacheHeader, datasets: Mapping[str, SequenceDataset | None]) -> tuple[str, ...]:
    """What became of the conversations of one cache, and how much of the datasets made from it is learnt."""
    if not header.conversations and not header.pairs:
        return ()
    used = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    rows = [dataset.rows for dataset in used.values() if dataset.rows is not None]
    why = "of two equal texts or with an empty one" if header.pairs else "without an assistant turn"
    counts = {
        f"{why} left out (first: {header.first_unlearnt})": header.unlearnt,
        f"{'texts ' if header.pairs else ''}cut to a sequence": sum(row.cut for row in rows),
        "left out because nothing to learn fits into a sequence": sum(row.cut_unlearnt for row in rows),
        "left out because both texts are equal as far as they fit into a sequence": sum(row.cut_equal for row in rows),
        "left out as longer than a sequence": sum(row.dropped for row in rows),
    }
    kind = "preference pairs" if header.pairs else "conversations"
    parts = [f"{(header.pairs or header.conversations) + header.unlearnt:,} {kind}"]
    parts += [f"{count:,} {what}" for what, count in counts.items() if count]
    for name, dataset in used.items():
        positions = dataset.rows_numel * dataset.sequence_length
        share = f"{dataset.targets_numel:,} tokens learnt in {dataset.rows_numel:,} sequences"
        parts.append(f"{name}: {share} ({dataset.targets_numel / max(1, positions):.0%} of their length)")
    return ("; ".join(parts),)
