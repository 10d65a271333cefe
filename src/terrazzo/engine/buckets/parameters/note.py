"""What the engine has noted on a parameter: how its values are reached, and what its gradients are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Note", "note_of", "sharded_name"]


@dataclass(eq=False)
class Note:
    """Notes of the engine on a parameter, or on what stands in for one: its one attribute there.

    Attributes:
        name: what errors call it.
        split: whether its values are split over ranks; else they are only out of reach while they are updated.
        alias: what `.data` gives, in place of torch's own.
        reach: gathers the values if the model's forward runs; returns whether they are on this rank.
        measure: what a function makes of the values while they are split; None where it makes nothing.
        arrive: waits for new values that are on their way.
        refuses: why no gradient may come from what is computed with it now; None where one may.
        loss_scale: what its gradients are multiplied by while autograd has them; None where there is no such scale.
        accumulate_hook: number of the engine's hook after autograd's accumulation, which takes the gradient away.
        gradient_hooks: numbers of its hooks before the accumulation.
    """

    name: str
    split: bool = True
    alias: Callable[[nn.Parameter], Tensor] | None = None
    reach: Callable[[], bool] | None = None
    measure: Callable[..., Any] | None = None
    arrive: Callable[[], None] | None = None
    refuses: str | None = None
    loss_scale: Callable[[], float] | None = None
    accumulate_hook: int | None = None
    gradient_hooks: set[int] = field(default_factory=set)


def note_of(tensor: Tensor) -> Note | None:
    """Notes of the engine on a tensor; None on one that is not its own."""
    note: Note | None = vars(tensor).get("terrazzo_note")
    return note


def sharded_name(parameter: Tensor) -> str | None:
    """Name of a trainable parameter of a sharded model; None for any other tensor."""
    note = note_of(parameter) if parameter.requires_grad else None
    return None if note is None else note.name
