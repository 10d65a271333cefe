"""The record of Accelerate's YAML, and how such a document is recognised."""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.core.keys import meaning_of
from terrazzo.dialects.formats.accelerate.findings import findings
from terrazzo.dialects.formats.accelerate.keys import KEYS, canonical_key
from terrazzo.dialects.formats.accelerate.read import read
from terrazzo.dialects.formats.accelerate.write import write

__all__ = ["DIALECT"]

_TELLING = ("distributed_type", "compute_environment", "main_training_function", "deepspeed_config", "downcast_bf16")


def recognises(document: ConfigDocument) -> bool:
    """Whether it has keys that no other dialect has at the top."""
    return any(key in document for key in _TELLING)


DIALECT = Dialect(
    name="accelerate",
    title="Accelerate YAML",
    suffix=".yaml",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
    meaning_by=lambda key: meaning_of(KEYS, canonical_key(key)),
)
