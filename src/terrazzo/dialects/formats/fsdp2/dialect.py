"""The record of FSDP2's arguments, `fully_shard(module, **these)`, and how they are recognised."""

from __future__ import annotations

from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.fsdp2.findings import findings
from terrazzo.dialects.formats.fsdp2.keys import KEYS
from terrazzo.dialects.formats.fsdp2.read import read
from terrazzo.dialects.formats.fsdp2.write import write

__all__ = ["DIALECT"]


def recognises(document: ConfigDocument) -> bool:
    """Whether it has argument names of this library, and no others."""
    names = {key.partition(".")[0] for key in KEYS}
    return bool(document) and set(document) <= names


DIALECT = Dialect(
    name="fsdp2",
    title="torch FSDP2 (fully_shard) arguments",
    suffix=".yaml",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
)
