"""What became of one key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["KINDS", "LOST", "TODAY", "KeyVerdict", "Loss", "VerdictKind", "worst"]

VerdictKind = Literal["applied", "defaulted", "renamed", "lossy", "refused"]
"""What became of a key, from the mildest to the gravest: see `KeyVerdict`."""
KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
Loss = Literal["harmless", "lossy", "refused"]
"""What another dialect loses without a key: nothing, something, or the same numbers."""
LOST: dict[Loss, VerdictKind] = {"harmless": "defaulted", "lossy": "lossy", "refused": "refused"}
"""The verdict on a key in a dialect that has no such key, by the loss that its row names."""
TODAY = "today's word is "
"""What is said of a key in an older spelling, before the one of today."""


@dataclass(frozen=True)
class KeyVerdict:
    """What became of one key.

    Attributes:
        key: the dotted key; in a `Writing`, the path of the neutral setting.
        value: as it stands there.
        kind: `applied`: it means the same; `renamed`: the same under another name; `defaulted`: a rule or a default
            gives the value ("auto", or the target's own choice of what only tunes, logs or evaluates); `lossy`:
            a part of its meaning is lost; `refused`: it cannot be taken over.
        target: what it became: a path of the description when reading, the target's key when writing.
        why: what is lost, or what to do instead; empty where nothing needs saying.
        tuning: of `defaulted`: the key only tunes, logs or evaluates. It is left out, and no result changes.
        holds: of a writer's: the setting holds by what `why` says, whatever the document read back says of it. Any
            other `why` is a remark, and what was written is held against the source all the same.
    """

    key: str
    value: Any
    kind: VerdictKind
    target: str = ""
    why: str = ""
    tuning: bool = False
    holds: bool = False


def worst(kinds: Iterable[VerdictKind]) -> VerdictKind:
    """The gravest of some kinds; `applied` of none."""
    return max(kinds, key=KINDS.index, default="applied")
