"""Why something is exchanged: the words for it, what its labels have a number of, and what errors ask for."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from terrazzo.engine.labels.declared_calls import NUMBERED_CALLS
from terrazzo.engine.labels.numbered import (
    NUMBERED_EXPERTS,
    NUMBERED_MEASURES,
    NUMBERED_MODULES,
    NUMBERED_UNITS,
    Numbered,
)

__all__ = ["PURPOSE_BITS", "RUN_ALL_EXPERTS", "RUN_THE_SAME", "Purpose"]

PURPOSE_BITS = 5
"""Bits that a label has for its purpose."""

RUN_THE_SAME = (
    "Every rank must run the same number of forwards, backwards and steps, with the same ones inside "
    "'with tz.accumulate(model)'; what their data lets them skip inside of the model may differ."
)
"""The edit that errors ask for of passes and steps; those below are of other exchanges."""
_RUN_THE_SAME_MODULES = (
    "Ranks that share matrices or sequences must run the same modules, as often and in the same order, forward and "
    "backward: let no rank skip one by its own data, and decide what is skipped from what all of them have."
)
RUN_ALL_EXPERTS = (
    "Each rank that shares experts must call every module of them, and the blocks around it, as often as the others "
    "and in the same order: where it has no tokens for one, it calls that with no rows, a tensor of shape "
    "[0, channels]; and the loss must depend on what it returns."
)
_CALL_EVERYWHERE = (
    "What ranks agree on, measure, clip, save or load together is asked for on every rank, in the same order: let no "
    "rank leave it out, or do it alone as in 'if rank == 0:'."
)
_MEASURE_THE_SAME = (
    "The number is of all their parts: ask for the same ones in the same order on every rank, such as that of "
    "model.named_parameters(), which a set does not keep."
)


class Purpose(IntEnum):
    """Why something is exchanged.

    Attributes:
        words: for an exchange, with `{what}` it moves and the `{number}` of its pass.
        edit: what errors ask for where others are elsewhere; that of most calls, which may be declared with their own.
        of: what the label's `index` is the number of; None: of nothing.
    """

    words: str
    edit: str
    of: Numbered | None

    def __new__(cls, number: int, words: str = "", edit: str = "", of: Numbered | None = None) -> Self:
        purpose = int.__new__(cls, number)
        purpose._value_, purpose.words, purpose.edit, purpose.of = number, words, edit, of
        return purpose

    AGREEMENT = 0, "an agreement, as on what all ranks are given", _CALL_EVERYWHERE
    FORWARD = 1, "the weights of {what} for training forward {number}", RUN_THE_SAME, NUMBERED_UNITS
    EVALUATION = 2, "the weights of {what} for forward {number}, without gradients", RUN_THE_SAME, NUMBERED_UNITS
    BACKWARD = 3, "the weights of {what} for backward {number}", RUN_THE_SAME, NUMBERED_UNITS
    STRAY = 4, "the weights of {what}, which came in another order than before", RUN_THE_SAME, NUMBERED_UNITS
    OUTSIDE = 5, "the weights of {what} outside of the model's forward and backward", RUN_THE_SAME, NUMBERED_UNITS
    GRADIENT = 6, "the gradient of {what} in backward {number}, the last of its step", RUN_THE_SAME, NUMBERED_UNITS
    PARTIAL = (
        7,
        "the gradient of {what} in backward {number}, inside of 'with tz.accumulate(model)'",
        RUN_THE_SAME,
        NUMBERED_UNITS,
    )
    UPDATED = 8, "the updated weights of {what}", RUN_THE_SAME, NUMBERED_UNITS
    END_OF_FORWARD = 9, "the end of forward {number}", RUN_THE_SAME
    END_OF_BACKWARD = 10, "the end of backward {number}", RUN_THE_SAME
    EXPERTS = 11, "rows for the experts of {what}", RUN_ALL_EXPERTS, NUMBERED_EXPERTS
    EXPERTS_BACK = 12, "gradients of what the experts of {what} gave", RUN_ALL_EXPERTS, NUMBERED_EXPERTS
    CALL = 13, "{what}", _CALL_EVERYWHERE, NUMBERED_CALLS
    MATRICES = 14, "matrices that an optimizer updates whole", RUN_THE_SAME
    OUTER = 15, "outer step {number}", RUN_THE_SAME
    ACTIVATIONS = (
        16,
        "activations of {what}, exchange {number} along their axis",
        _RUN_THE_SAME_MODULES,
        NUMBERED_MODULES,
    )
    ACTIVATIONS_BACK = (
        17,
        "gradients of activations of {what}, exchange {number} along their axis",
        _RUN_THE_SAME_MODULES,
        NUMBERED_MODULES,
    )
    LOSS = 18, "a loss of parts of the vocabulary, exchange {number}", _RUN_THE_SAME_MODULES
    NORM = 19, "the norm of all gradients", _CALL_EVERYWHERE
    MEASURE = 20, "{what}", _MEASURE_THE_SAME, NUMBERED_MEASURES
    CHECKPOINT = 21, "a checkpoint", _CALL_EVERYWHERE

    @property
    def moves_a_unit(self) -> bool:
        """Whether exchanges for it move weights or gradients of one unit, whose index is in their labels."""
        return self.of is NUMBERED_UNITS


assert len(Purpose) <= 1 << PURPOSE_BITS, "labels have no room for the number of a purpose"
