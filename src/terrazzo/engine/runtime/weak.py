"""Calls of what may be gone: whoever is given one does not keep its owner, such as a model, alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from terrazzo.errors import Misuse

__all__ = ["model_gone", "weakly"]


def weakly(owner: object, method: Callable[..., Any], *first: Any, trains: str = "") -> Callable[..., Any]:
    """`method` of `owner` without keeping that alive; None once it is gone.

    Args:
        first: arguments before those of each call.
        trains: what would be trained by a call, which then raises `Misuse` once the owner is gone.
    """
    reference = weakref.ref(owner)

    def call(*further: Any) -> Any:
        live = reference()
        if live is None and trains:
            raise model_gone(trains)
        return method(live, *first, *further) if live is not None else None

    return call


def model_gone(name: str) -> Misuse:
    """What to raise where `name` would train a model that has been freed."""
    return Misuse(
        f"{name} belongs to a sharded model that is gone, because nobody kept it: it would not train. Keep what "
        "tz.shard returns for as long as it is trained, as in 'model, optimizer = tz.shard(model, optimizer)', and "
        "call that."
    )
