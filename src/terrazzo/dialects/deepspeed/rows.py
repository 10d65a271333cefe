"""What one key of DeepSpeed's configuration is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Keep", "Kind", "Row", "below"]

Kind = Literal["bool", "int", "number", "text", "names", "any"]
Keep = Literal["", "harmless", "lossy", "refused"]


@dataclass(frozen=True)
class Row:
    """One key.

    Attributes:
        kind: of its value; `any` is not checked.
        default: DeepSpeed's; None also means that the key may be null.
        meaning: in a few words.
        keep: what another dialect loses without it: nothing (`harmless`), something (`lossy`), or the same numbers
            (`refused`). Empty: it has a place in the neutral description, and a reader of its own.
        why: the loss in words; default: the meaning.
    """

    kind: Kind
    default: Any
    meaning: str
    keep: Keep = ""
    why: str = ""


def below(section: str, rows: dict[str, Row]) -> dict[str, Row]:
    """The same rows under the dotted name of their section."""
    return {f"{section}.{name}": row for name, row in rows.items()}
