"""The record of Terrazzo's own YAML, and how such a document is recognised."""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.config import CONFIG_KEYS, SHORTHANDS
from terrazzo.dialects.core.dialect import ConfigDocument, Dialect
from terrazzo.dialects.formats.terrazzo.findings import findings
from terrazzo.dialects.formats.terrazzo.keys import KEYS
from terrazzo.dialects.formats.terrazzo.read import read
from terrazzo.dialects.formats.terrazzo.write import write
from terrazzo.parallel.sharing_rules import shares_key_heads

__all__ = ["DIALECT"]


def recognises(document: ConfigDocument) -> bool:
    """Whether it has Terrazzo's sections alone, and in them mostly Terrazzo's keys, or one by its name alone."""
    sections = {key.partition(".")[0] for key in CONFIG_KEYS}
    if not document or not set(document) <= sections:
        return False
    names = [f"{section}.{key}" for section, inner in document.items() if isinstance(inner, Mapping) for key in inner]
    known = [name for name in names if name in CONFIG_KEYS or name == "plan.mesh"]
    named = any(isinstance(document.get(section), str) for section in SHORTHANDS)
    return named or 2 * len(known) > len(names) or (bool(known) and len(names) < 4)


def _has_stages(layers: int, stages: int) -> bool:
    """Whether each stage has a block, the embedding or the head."""
    return stages <= layers + 2


DIALECT = Dialect(
    name="terrazzo",
    title="Terrazzo YAML",
    suffix=".yaml",
    keys=KEYS,
    recognises=recognises,
    read=read,
    write=write,
    findings=findings,
    can_share={"kv_heads": shares_key_heads, "layers": _has_stages},
    fills_batches=True,
    one_copy=True,
)
