"""The keys of Terrazzo's own YAML: those of its schema, and the sections that may be one word."""

from __future__ import annotations

from terrazzo.config import CONFIG_KEYS, SHORTHANDS
from terrazzo.dialects.core.keys import ANY, Key

__all__ = ["KEYS"]

KEYS = {
    **{name: Key(ANY, None, "") for name in SHORTHANDS},
    **{name: Key(ANY, key.default, key.meaning) for name, key in CONFIG_KEYS.items()},
    "optimizer.options.*": Key(ANY, None, ""),
}
"""Rows by dotted key. Which values are allowed is decided by the schema."""
