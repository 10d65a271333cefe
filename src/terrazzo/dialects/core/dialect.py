"""What every dialect is: a record of functions, which recognise, read and write; and what these take and return."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.keys import Key, meaning_of

__all__ = [
    "NO_CONTEXT",
    "ConfigDocument",
    "Dialect",
    "Finding",
    "ReadFunction",
    "Reading",
    "ReadingContext",
    "WriteFunction",
    "Writing",
]

ConfigDocument = Mapping[str, Any]
"""A configuration as plain data: the `document` of what `documents` loads."""


@dataclass(frozen=True)
class ReadingContext:
    """What a configuration does not say and its meaning may depend on.

    Attributes:
        world: number of ranks.
        hidden_size: of the model; Hugging Face's rules for "auto" need it.
        parameters: number of the model's parameters, for the bytes in tables.
        heads, kv_heads: of the model's attention: tensor and sequence parallelism cut them.
        layers: number of the model's blocks; block_numel: elements of the largest.
        experts: of one of its mixture-of-experts layers; 0 without.
        positions: longest sequence that it takes, None where nothing limits it.
        tied: the head of the model is its embedding.
        load_dtype: the dtype in which the model is loaded; None: not known, and `LOADED` where a stack keeps it.
        versions: of the libraries that would read the file, such as `{"deepspeed": "0.18.2"}`; default: those that
            the readers were written against.
        trainer: fields of TrainingArguments given beside the file; they resolve "auto".
        folder: where files that the configuration names lie.
        fills_auto: whether the library that hands a DeepSpeed document on puts values where it says "auto".
    """

    world: int | None = None
    hidden_size: int | None = None
    parameters: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    block_numel: int | None = None
    experts: int | None = None
    positions: int | None = None
    tied: bool = False
    load_dtype: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    fills_auto: bool = True

    def version(self, library: str, default: str) -> tuple[int, ...]:
        """The version of a library, as three numbers to compare: `0.19.8` and `0.17` are `(0, 19, 8)`, `(0, 17, 0)`."""
        release = self.versions.get(library, default).partition("+")[0]  # behind it is how it was built
        return tuple(int(part) for part in (re.findall(r"\d+", release) + ["0"] * 3)[:3])


NO_CONTEXT = ReadingContext()


@dataclass(frozen=True)
class Reading:
    """A document, understood.

    Attributes:
        description: what it means.
        verdicts: one for every key of the document.
        document: as it was read; that of the description lacks what its library refuses.
        values: what each key says, by today's spelling and parsed as its row says, such as False for the word "false";
            None where that is nothing. A key without a row, or that is kept whatever it is, is as it stands.
    """

    description: Description
    verdicts: tuple[KeyVerdict, ...]
    document: ConfigDocument
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Writing:
    """A description, written.

    Attributes:
        verdicts: one for every setting that is set; their keys are its paths.
        missing: what the target needs, and the source leaves to code.
    """

    document: dict[str, Any]
    verdicts: tuple[KeyVerdict, ...]
    missing: tuple[KeyVerdict, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something that `check` reports: an error stops a run or changes what it does; a warning may be meant."""

    key: str
    level: Literal["error", "warning"]
    text: str

    @classmethod
    def error(cls, key: str, text: str) -> Finding:
        return cls(key, "error", text)

    @classmethod
    def warning(cls, key: str, text: str) -> Finding:
        return cls(key, "warning", text)


class ReadFunction(Protocol):
    """What a document means. A bad value is a `refused` verdict and its setting the default, not an exception."""

    def __call__(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT, /) -> Reading: ...


class WriteFunction(Protocol):
    """A document that means what a description says, so far as the dialect has words for it."""

    def __call__(self, description: Description, context: ReadingContext = NO_CONTEXT, /) -> Writing: ...


@dataclass(frozen=True)
class Dialect:
    """One library's configuration: its names, its table of keys, and the functions that know it.

    Attributes:
        name: as in `--to`, such as `deepspeed`.
        title: as in messages, such as "DeepSpeed JSON".
        suffix: of its files: `.json`, `.yaml` or `.sh`.
        keys: dotted; `<...>` stands for any name, and a key with `.*` at its end for everything below it.
        recognises: whether a document is of this dialect, as far as its keys tell. It never raises.
        read: see `ReadFunction`.
        write: see `WriteFunction`.
        findings: combinations of keys that the library refuses, or takes otherwise than they look.
        meaning_by: what a key does, where the key's spelling in a document is not that of its row; None: see `meaning`.
        program: what a script of arguments starts; empty where the configuration is a file.
        can_share: whether a number of ranks can share so many of something, by its name in `ReadingContext`; of what is
            not here, as many libraries do.
        fills_batches: a global batch need not be a multiple of what the ranks take at once.
        one_copy: weights that are split as their masters are, and narrower, are no memory beside them.
    """

    name: str
    title: str
    suffix: str
    keys: Mapping[str, Key]
    recognises: Callable[[ConfigDocument], bool]
    read: ReadFunction
    write: WriteFunction
    findings: Callable[[Reading, ReadingContext], Iterable[Finding]]
    meaning_by: Callable[[str], str] | None = None
    program: str = ""
    can_share: Mapping[str, Callable[[int, int], bool]] = field(default_factory=dict)
    fills_batches: bool = False
    one_copy: bool = False

    def written(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        """A description as a document of this dialect; the very document where it was read from one."""
        if description.dialect != self.name:
            return self.write(description, context)
        told = [(path, setting) for path, setting in description.items() if setting.is_set]
        verdicts = (KeyVerdict(path, setting.value, "applied", setting.key) for path, setting in told)
        return Writing(dict(description.document), tuple(verdicts))

    def meaning(self, key: str) -> str:
        """What a key does, in a few words of its row; empty where it has none."""
        return meaning_of(self.keys, key) if self.meaning_by is None else self.meaning_by(key)
