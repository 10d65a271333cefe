"""What every dialect is: recognised, read into the neutral description, and written from it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.key_verdict import KeyVerdict
from terrazzo.dialects.core.keys import Key, row_of

__all__ = ["NO_CONTEXT", "ConfigDocument", "Dialect", "Finding", "Reading", "ReadingContext", "Writing"]

ConfigDocument = Mapping[str, Any]
"""A configuration as plain data: what `files.load` returns."""


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

    def version(self, library: str, default: str) -> tuple[int, ...]:
        """The version of a library, as numbers to compare: `(0, 19, 8)`."""
        return tuple(int(part) for part in re.findall(r"\d+", self.versions.get(library, default))[:3])


NO_CONTEXT = ReadingContext()


@dataclass(frozen=True)
class Reading:
    """A document, understood. `verdicts` has one for every key of the document."""

    description: Description
    verdicts: tuple[KeyVerdict, ...]


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


class Dialect(ABC):
    """One library's configuration.

    Attributes:
        name: as in `--to`, such as `deepspeed`.
        title: as in messages, such as "DeepSpeed JSON".
        suffix: of its files: `.json` or `.yaml`.
        keys: dotted; `<...>` stands for any name, and a key with `.*` at its end for everything below it.
    """

    name: str
    title: str
    suffix: str = ".yaml"
    keys: Mapping[str, Key]

    @abstractmethod
    def recognises(self, document: ConfigDocument) -> bool:
        """Whether a document is of this dialect, as far as its keys tell. It must not raise, whatever is in there."""

    @abstractmethod
    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        """What a document means. A bad value is a `refused` verdict and its setting the default, not an exception."""

    @abstractmethod
    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        """A document that means this, so far as the dialect can say it."""

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        """Combinations of keys that this library refuses, or takes otherwise than they look."""
        return ()

    def meaning(self, key: str) -> str:
        """What a key does, in a few words; empty where it is not known."""
        row = row_of(self.keys, key)
        return row.meaning if row else ""
