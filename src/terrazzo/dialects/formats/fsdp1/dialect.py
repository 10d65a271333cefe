"""The record of FSDP1's arguments, `FullyShardedDataParallel(model, **these)`, and how they are recognised."""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.fsdp1.findings import findings
from terrazzo.dialects.formats.fsdp1.keys import KEYS
from terrazzo.dialects.formats.fsdp1.read import read
from terrazzo.dialects.formats.fsdp1.write import write

__all__ = ["DIALECT"]


def recognises(document: ConfigDocument) -> bool:
    """Whether it has argument names of this library, and no others."""
    names = {key.partition(".")[0] for key in KEYS}
    return bool(document) and set(document) <= names and not isinstance(document.get("mixed_precision"), str)


DIALECT = Dialect(
    name="fsdp1",
    title="torch FSDP1 arguments",
    suffix=".yaml",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
)
