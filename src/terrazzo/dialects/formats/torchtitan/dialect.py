"""The record of torchtitan's `Trainer.Config`, and how such a document is recognised.

A config is built by a Python function; the document is its data, section by section, or the TOML of earlier versions.
The class of `activation_checkpoint` is said as `type`, or as the section's only value; where neither is there, as in a
saved file, its fields tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.torchtitan.findings import findings
from terrazzo.dialects.formats.torchtitan.keys_earlier import RENAMED
from terrazzo.dialects.formats.torchtitan.read import read
from terrazzo.dialects.formats.torchtitan.torchtitan_reader import ROWS
from terrazzo.dialects.formats.torchtitan.write import write

__all__ = ["DIALECT"]

_SECTIONS = {key.partition(".")[0] for key in (*ROWS, *RENAMED, "profiling", "validation")}
_OWN = ("parallelism", "training", "lr_scheduler", "compile")
"""Sections that no other dialect has."""


def recognises(document: ConfigDocument) -> bool:
    """Whether it has the sections, and at least one key that no other dialect has."""
    if not document or not set(document) <= _SECTIONS:
        return False
    inner = {f"{section}.{name}" for section, names in document.items() if isinstance(names, Mapping) for name in names}
    own = {key for key in (*ROWS, *RENAMED) if key.partition(".")[0] in _OWN}
    return bool(inner & own)


DIALECT = Dialect(
    name="torchtitan",
    title="torchtitan Trainer.Config",
    suffix=".yaml",
    keys=ROWS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
)
