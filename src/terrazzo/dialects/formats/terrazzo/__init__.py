"""Terrazzo's own YAML: the hub that every dialect is converted to and from."""

from terrazzo.dialects.formats.terrazzo.dialect import Terrazzo

__all__ = ["Terrazzo"]
