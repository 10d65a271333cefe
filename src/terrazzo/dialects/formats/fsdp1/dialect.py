"""FSDP1's arguments, as a dialect."""

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
from terrazzo.dialects.formats.fsdp1.findings import findings
from terrazzo.dialects.formats.fsdp1.keys import KEYS
from terrazzo.dialects.formats.fsdp1.read import read
from terrazzo.dialects.formats.fsdp1.write import write

__all__ = ["FSDP1"]


class FSDP1(Dialect):
    """`FullyShardedDataParallel(model, **these)`.

    Args:
        library: who passes them on, as in messages of the writer.
    """

    name = "fsdp1"
    title = "torch FSDP1 arguments"
    suffix = ".yaml"
    keys = KEYS

    def __init__(self, library: str = "FSDP1") -> None:
        self.library = library

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has argument names of this library, and no others."""
        names = {key.partition(".")[0] for key in KEYS}
        return bool(document) and set(document) <= names and not isinstance(document.get("mixed_precision"), str)

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context, self.library)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document)
