"""Values in messages and on pages: as a document has them, and as a description means them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.engine import LossScaling
from terrazzo.messages import shortened

__all__ = ["PLACES", "as_text", "found", "meant"]

PLACES = {
    "-": "a full copy on every rank",
    "D": "split over all data ranks",
    "S": "split over the ranks of dp_shard",
    "S,R": "split over the ranks of dp_shard, and each part over those of dp_replicate",
}
"""What the settings of `sharding` say, in words."""


def as_text(value: Any) -> str:
    """A value as a configuration writes it, shortened."""
    if isinstance(value, str):
        text = value
    elif value is None or isinstance(value, bool):
        text = {None: "none", True: "true", False: "false"}[value]
    elif isinstance(value, LossScaling):
        text = f"loss scale from {value.init:g}, doubled after {value.interval} good steps"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name} {as_text(inner)}" for name, inner in value.items()) or "none"
    elif isinstance(value, tuple | list):
        text = ", ".join(as_text(each) for each in value) or "none"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return shortened(text)


def meant(path: str, value: Any) -> str:
    """A setting's value in words, by its path."""
    if path.startswith("sharding."):
        return PLACES.get(value, f"split over {value}")
    return as_text(value)


def found(raw: Any) -> str:
    """A value as it stands in a document, with text in quotes: what findings and verdicts say of a key's value."""
    if raw is None:
        return "empty"
    return str(raw).lower() if isinstance(raw, bool) else shortened(repr(raw))
