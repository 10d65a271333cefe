"""torchtitan's `Trainer.Config`, as the mapping that its `save_config_file` writes, and the TOML of earlier versions.

A config is built by a Python function; this is its data, section by section. The class of `activation_checkpoint` is
said as `type`, or as the section's only value; where neither is there, as in a saved file, its fields tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from terrazzo.dialects.formats.torchtitan.findings import findings
from terrazzo.dialects.formats.torchtitan.keys import KEYS, REMOVED
from terrazzo.dialects.formats.torchtitan.read import read
from terrazzo.dialects.formats.torchtitan.write import write

__all__ = ["Torchtitan"]

_SECTIONS = {key.partition(".")[0] for key in (*KEYS, *REMOVED)}


class Torchtitan(Dialect):
    """The configuration of `torchtitan.trainer.Trainer`."""

    name = "torchtitan"
    title = "torchtitan Trainer.Config"
    suffix = ".yaml"
    keys = KEYS

    def recognises(self, document: ConfigDocument) -> bool:
        """Whether it has the sections, and at least one key that no other dialect has."""
        if not document or not set(document) <= _SECTIONS:
            return False
        inner = {
            f"{section}.{name}" for section, names in document.items() if isinstance(names, Mapping) for name in names
        }
        own = {key for key in KEYS if key.partition(".")[0] in ("parallelism", "training", "lr_scheduler", "compile")}
        return bool(inner & own)

    def read(self, document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
        return read(document, context)

    def write(self, description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
        return write(description, context)

    def findings(self, document: ConfigDocument, reading: Reading, context: ReadingContext) -> Iterable[Finding]:
        return findings(document, context)
