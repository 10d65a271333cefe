"""What an exchange between ranks moves, so that two which do not belong together raise.

Ranks issue their exchanges in one order that all of them share (see `order`). Should they ever not, chunks of different
units could meet, of the same size and without an error. So each exchange says what it is for: in its messages, or where
those have no room for it (NCCL) in a checksum that ranks compare when they meet (see `pass_end`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from terrazzo.errors import RanksApart
from terrazzo.messages import of_ranks

__all__ = [
    "CALLS",
    "NOT_THE_SAME",
    "RUN_THE_SAME",
    "RUN_THE_SAME_MODULES",
    "Label",
    "Purpose",
    "Stamp",
    "labelled",
    "moving",
    "places_text",
    "title_of",
]

NOT_THE_SAME = "The ranks have not run the same"
"""How errors of ranks that have come apart begin."""
RUN_THE_SAME = (
    "Every rank must run the same number of forwards, backwards and steps, with the same ones inside "
    "'with tz.accumulate(model)'; what their data lets them skip inside of the model may differ."
)
"""The edit that they ask for."""


class Purpose(IntEnum):
    """Why something is exchanged."""

    AGREEMENT = 0
    FORWARD = 1
    EVALUATION = 2
    BACKWARD = 3
    STRAY = 4
    OUTSIDE = 5
    GRADIENT = 6
    PARTIAL = 7
    UPDATED = 8
    END_OF_FORWARD = 9
    END_OF_BACKWARD = 10
    EXPERTS = 11
    EXPERTS_BACK = 12
    CALL = 13
    MATRICES = 14
    OUTER = 15
    ACTIVATIONS = 16
    ACTIVATIONS_BACK = 17
    LOSS = 18
    NORM = 19
    MEASURE = 20
    CHECKPOINT = 21


_WORDS = {
    Purpose.AGREEMENT: "an agreement, as on what all ranks are given",
    Purpose.FORWARD: "the weights of {unit} for training forward {number}",
    Purpose.EVALUATION: "the weights of {unit} for forward {number}, without gradients",
    Purpose.BACKWARD: "the weights of {unit} for backward {number}",
    Purpose.STRAY: "the weights of {unit}, which came in another order than before",
    Purpose.OUTSIDE: "the weights of {unit} outside of the model's forward and backward",
    Purpose.GRADIENT: "the gradient of {unit} in backward {number}, the last of its step",
    Purpose.PARTIAL: "the gradient of {unit} in backward {number}, inside of 'with tz.accumulate(model)'",
    Purpose.UPDATED: "the updated weights of {unit}",
    Purpose.END_OF_FORWARD: "the end of forward {number}",
    Purpose.END_OF_BACKWARD: "the end of backward {number}",
    Purpose.EXPERTS: "rows for the experts of {name!r}",
    Purpose.EXPERTS_BACK: "gradients of what the experts of {name!r} gave",
    Purpose.CALL: "{call}",
    Purpose.MATRICES: "matrices that an optimizer updates whole",
    Purpose.OUTER: "outer step {number}",
    Purpose.ACTIVATIONS: "activations of {module}, exchange {number} along their axis",
    Purpose.ACTIVATIONS_BACK: "gradients of activations of {module}, exchange {number} along their axis",
    Purpose.LOSS: "a loss of parts of the vocabulary, exchange {number}",
    Purpose.NORM: "the norm of all gradients",
    Purpose.MEASURE: "{name}",
    Purpose.CHECKPOINT: "a checkpoint",
}
RUN_THE_SAME_MODULES = (
    "Ranks that share matrices or sequences must run the same modules, as often and in the same order, forward and "
    "backward: let no rank skip one by its own data, and decide what is skipped from what all of them have."
)
_OF_ACTIVATIONS = (Purpose.ACTIVATIONS, Purpose.ACTIVATIONS_BACK, Purpose.LOSS)
_CALL_EVERYWHERE = (
    "What ranks agree on, measure, clip, save or load together is asked for on every rank, in the same order: let no "
    "rank leave it out, or do it alone as in 'if rank == 0:'."
)
_OF_CALLS = (Purpose.AGREEMENT, Purpose.NORM, Purpose.MEASURE, Purpose.CHECKPOINT, Purpose.CALL)
CALLS = (
    "model.state_dict()", "model.load_state_dict(state)", "optimizer.state_dict()", "optimizer.load_state_dict(state)",
)  # fmt: skip
"""Calls to be made on every rank, under names that plain PyTorch lets one rank alone call."""
_PURPOSE_BITS, _UNIT_BITS = 5, 24


@dataclass(frozen=True)
class Label:
    """One exchange.

    Attributes:
        unit: index of what is moved; of a call its index in `CALLS`; of activations that of their module.
        number: of the pass that it belongs to, or of the exchange of activations, counted on each rank from the start.
        names: of all units; of activations of the modules; of a measure the expression.
    """

    purpose: Purpose = Purpose.AGREEMENT
    unit: int = 0
    number: int = 0
    names: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The label in 63 bits, equal on ranks that move the same."""
        return self.purpose | self.unit << _PURPOSE_BITS | self.number << (_PURPOSE_BITS + _UNIT_BITS)

    def of_code(self, code: int) -> Label:
        """Another rank's label, in the words of this one."""
        purpose, rest = Purpose(code % (1 << _PURPOSE_BITS)), code >> _PURPOSE_BITS
        return replace(self, purpose=purpose, unit=rest % (1 << _UNIT_BITS), number=rest >> _UNIT_BITS)

    def check(self, code: int, who: str) -> None:
        """Refuse the `code` of another rank that is not this one's.

        Raises:
            RanksApart: there; it names both.
        """
        if code != self.code:
            raise RanksApart(
                f"{NOT_THE_SAME}: here it is the turn of {self}, and on {who} of {self.of_code(code)}. {self.edit}"
            )

    @property
    def edit(self) -> str:
        """What errors ask for where other ranks are elsewhere."""
        if self.purpose in _OF_ACTIVATIONS:
            return RUN_THE_SAME_MODULES
        return _CALL_EVERYWHERE if self.purpose in _OF_CALLS else RUN_THE_SAME

    def check_trail(self, own: Iterable[int], theirs: Iterable[int], who: str) -> None:
        """Refuse the first code of another rank's last exchanges that is not this one's; -1 stands for none.

        Raises:
            RanksApart: there; it names both, in the words of this label.
        """
        for mine, other in zip(own, theirs, strict=True):
            if mine != other and min(mine, other) >= 0:
                self.of_code(mine).check(other, who)

    def __str__(self) -> str:
        name = self.names[self.unit] if self.unit < len(self.names) else str(self.unit)
        unit = title_of(name) if self.unit < len(self.names) else f"unit {name}"
        call = CALLS[self.unit % len(CALLS)]
        module = repr(name) if self.unit < len(self.names) else f"layer {name}"
        return _WORDS[self.purpose].format(unit=unit, name=name, module=module, number=self.number, call=call)


def places_text(places: Mapping[int, str]) -> str:
    """Where ranks are, by rank: `"ranks 0, 2 at the end of forward 3; rank 1 at the end of forward 4"`."""
    at: dict[str, list[int]] = {}
    for rank in sorted(places):
        at.setdefault(places[rank], []).append(rank)
    return "; ".join(f"{of_ranks(ranks)} at {place}" for place, ranks in at.items())


def title_of(name: str) -> str:
    """The words for the unit of that name in messages."""
    return f"unit {name!r}" if name else "the root unit"


class Stamp(NamedTuple):
    """Marks of the messages of one exchange: the label, the tag of the message that says it, and that of the data."""

    label: Label
    first: int
    then: int


moving: ContextVar[Label] = ContextVar("moving", default=Label())  # noqa: B039 (it cannot change)
"""The label of the collective that is being started; `Transfer` and `labelled` set it, `collectives` read it."""


@contextmanager
def labelled(label: Label) -> Iterator[None]:
    """What is exchanged inside has this label."""
    before = moving.set(label)
    try:
        yield
    finally:
        moving.reset(before)
