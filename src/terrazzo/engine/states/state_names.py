"""Names in checkpoints of states of which several ranks have their own: the first has the plain name, others a number.

They are what optimizers keep in replicas that train by themselves, and the residuals of codes of gradients.
"""

from __future__ import annotations

__all__ = ["first_of", "is_numbered", "numbered"]


def numbered(kind: str, number: int) -> str:
    """Name in checkpoints of the state `kind` of the rank or replica of this number, from 0."""
    return f"{kind}@{number}" if number else kind


def first_of(kind: str) -> str:
    """Name of the same state of the first rank or replica."""
    return kind.partition("@")[0]


def is_numbered(kind: str) -> bool:
    """Whether `kind` names a state of another rank or replica than the first."""
    return first_of(kind) != kind
