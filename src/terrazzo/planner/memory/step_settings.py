"""What `walk` is asked: the units of a step and how they are run. And its answer: the fullest moment."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.planner.layout.stages import LastTurn
from terrazzo.planner.memory.unit_events import UnitEvents

__all__ = ["ACTIVATIONS", "BUFFERS", "HELD_KINDS", "LOGITS", "WORKING", "Peak", "StepSettings", "StepUnit"]

HELD_KINDS = ("gathered", "unreduced", "receive", "gradients", "activations", "working", "logits", "buffers")
ACTIVATIONS, WORKING, LOGITS, BUFFERS = range(4, len(HELD_KINDS))


@dataclass(frozen=True)
class StepUnit:
    """`count` equal units in a row.

    Attributes:
        saved: bytes of activations that one keeps from forward to backward.
        working: bytes that its backward needs besides: what it recomputes, and gradients of activations; or that its
            forward does, where there is no backward.
        chunk: the number of the stage that it is in, among those that the rank runs in turns.
        forward_only: no gradient goes back through it.
    """

    events: UnitEvents
    count: int = 1
    saved: float = 0.0
    working: float = 0.0
    chunk: int = 0
    forward_only: bool = False


@dataclass(frozen=True)
class Peak:
    """Bytes by `HELD_KINDS` at the moment when most is held, and that moment in words.

    Attributes:
        upper: the most that a device may need for these kinds at any moment, by `StepSettings.upper_shares`.
    """

    parts: tuple[float, ...]
    moment: str
    upper: float

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class StepSettings:
    """How the units of a rank are run.

    Attributes:
        loss: bytes of logits and of what the loss makes of them, at most.
        logits: the bytes of these that are there in the head's backward: the gradient of the logits.
        in_flight: activations of other micro-batches that wait for their backward, bytes.
        turns: the last turns of the engine's stages, empty without a pipeline. Several micro-batches of a step are in
            flight then: gradients are reduced, and what stays between forward and backward goes, when every backward
            has run.
        local: micro-batches before the last only add gradients. whole: what these add up to stays from step to step.
        gradual: gradients come one after the other while a unit's backward runs.
        with_gradients: count finished gradients that stay on the device too.
        update: bytes that the optimizer step needs.
        buffers: bytes of the model's buffers, of which the engine's stages have copies until every backward has run.
        under_way: bytes of an exchange of outer gradients, all step long.
        updates_run_on: updates away from the device run on into the next forward.
        upper_shares: how many times its bytes a kind may take at most. loss_extra: bytes that the loss may take beyond
            `loss`, times the share of logits.
    """

    prefetch: int = 1
    micro_batches: int = 1
    turns: tuple[LastTurn, ...] = ()
    local: bool = False
    whole: bool = False
    gradual: bool = True
    loss: float = 0.0
    logits: float = 0.0
    in_flight: float = 0.0
    with_gradients: bool = True
    update: float = 0.0
    buffers: float = 0.0
    under_way: float = 0.0
    updates_run_on: bool = False
    upper_shares: tuple[float, ...] = (1.0,) * len(HELD_KINDS)
    loss_extra: float = 0.0
