"""FSDP2's arguments, as a dialect."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import (
    NO_CONTEXT,
    ConfigDocument,
    Dialect,
    Finding,
    Reading,
    ReadingContext,
    Writing,
)
from terrazzo.dialects.formats.fsdp2.findings import findings
from terrazzo.dialects.formats.fsdp2.keys import KEYS
from terrazzo.dialects.formats.fsdp2.read import read
from terrazzo.dialects.formats.fsdp2.write import write

__all__ = ["FSDP2"]


class FSDP2(Dialect):
    """`fully_shard(module, **these)` for every unit and the root."""

    name = "fsdp2"
    title = "torch FSDP2 (fully_shard) arguments"
    suffix = ".yaml"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has argument names of this library, and no others."""
        names = {key.partition(".")[0] for key in KEYS}
        return bool(document) and set(document) <= names

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document)
