"""Accelerate's YAML, as a dialect: what `accelerate launch --config_file` runs."""

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
from terrazzo.dialects.formats.accelerate.findings import findings
from terrazzo.dialects.formats.accelerate.keys import KEYS, canonical_key
from terrazzo.dialects.formats.accelerate.read import read
from terrazzo.dialects.formats.accelerate.write import write

__all__ = ["Accelerate"]

_TELLING = ("distributed_type", "compute_environment", "main_training_function", "deepspeed_config", "downcast_bf16")


class Accelerate(Dialect):
    """Accelerate's configuration of `accelerate launch`."""

    name = "accelerate"
    title = "Accelerate YAML"
    suffix = ".yaml"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has keys that no other dialect has at the top."""
        return any(key in document for key in _TELLING)

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        """See `Dialect.read`."""
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        """See `Dialect.write`."""
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        """What Accelerate refuses, and what it passes over."""
        return findings(document, reading, context)

    def meaning(self, key: str) -> str:
        """What a key does, with or without its section's prefix."""
        return super().meaning(canonical_key(key))
