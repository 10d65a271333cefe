"""The label of an exchange: its purpose, what it moves, and of which model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch.distributed as dist

from terrazzo.engine.labels.declared_calls import DECLARED_CALLS, declare_call
from terrazzo.engine.labels.numbered import INDEX_BITS, Names, text_number
from terrazzo.engine.labels.purposes import PURPOSE_BITS, Purpose
from terrazzo.engine.labels.rank_places import PlacesDiffer, RankPlace, apart_text
from terrazzo.errors import RanksApart

__all__ = ["Label", "collective_call", "labelled", "measuring", "moving"]

_MODELS = 1 << 8
"""How far models are counted in a code: two whose numbers are so far apart have the same there."""
_NUMBERS = (1 << (63 - PURPOSE_BITS - INDEX_BITS)) // _MODELS
"""How far passes and exchanges are."""

_NO_NAMES = Names()


@dataclass(frozen=True)
class Label:
    """One exchange.

    Attributes:
        index: the number of what is moved, where it is of one unit, module, call or measure.
        number: of the pass that it belongs to, or of the exchange of activations, counted on each rank from the start.
        names: by which this label is read, and those of other ranks.
        model: which one it is of, among those that exchange in the group; set where an exchange begins (see `Links`).
    """

    purpose: Purpose = Purpose.AGREEMENT
    index: int = 0
    number: int = 0
    names: Names = _NO_NAMES
    model: int = 0

    @property
    def code(self) -> int:
        """The label in 63 bits, equal on ranks that move the same."""
        numbers = self.model % _MODELS * _NUMBERS + self.number % _NUMBERS
        return self.purpose | self.index << PURPOSE_BITS | numbers << (PURPOSE_BITS + INDEX_BITS)

    def of_code(self, code: int) -> Label:
        """Another rank's label, with the names that this one knows."""
        purpose, rest = Purpose(code % (1 << PURPOSE_BITS)), code >> PURPOSE_BITS
        model, number = divmod(rest >> INDEX_BITS, _NUMBERS)
        return replace(self, purpose=purpose, index=rest % (1 << INDEX_BITS), number=number, model=model)

    @property
    def edit(self) -> str:
        """What errors ask for where other ranks are elsewhere."""
        call = DECLARED_CALLS.get(self.index) if self.purpose is Purpose.CALL else None
        return self.purpose.edit if call is None else call.edit

    def place(self, detail: str = "") -> RankPlace:
        """Where a rank is that comes to this exchange."""
        return RankPlace(str(self), self.edit, detail, self.code, self.model % _MODELS)

    def check(self, size_bytes: int, rank: int, code: int, their_bytes: int) -> None:
        """Refuse what another rank brings to this exchange, where it is not what this rank expects.

        Args:
            size_bytes: that this rank expects.
            rank: the other.
            code, their_bytes: that it says.

        Raises:
            PlacesDiffer: there.
        """
        if (code, their_bytes) != (self.code, size_bytes):
            own, other = self.place(f"{size_bytes} bytes"), self.of_code(code).place(f"{their_bytes} bytes")
            raise PlacesDiffer({dist.get_rank(): own, rank: other})

    def check_trail(self, own: Iterable[int], theirs: Iterable[int], rank: int) -> None:
        """Refuse the first code of another rank's last exchanges that is not this one's; -1 stands for none.

        Raises:
            RanksApart: there; it names both, by the names of this label.
        """
        for mine, other in zip(own, theirs, strict=True):
            if mine != other and min(mine, other) >= 0:
                places = {dist.get_rank(): self.of_code(mine).place(), rank: self.of_code(other).place()}
                raise RanksApart(apart_text(places))

    def __str__(self) -> str:
        what = "" if self.purpose.of is None else self.purpose.of.words(self.index, self.names)
        return self.purpose.words.format(what=what, number=self.number)


def collective_call(text: str, edit: str = Purpose.CALL.edit) -> Label:
    """The label of what a call of all ranks exchanges and does not name otherwise; declares the call.

    To be called as a module is imported: a rank that comes to another exchange knows the call then.

    Args:
        text: the call, as a user writes it.
        edit: what errors ask for where others are elsewhere.
    """
    return Label(Purpose.CALL, declare_call(text, edit))


def measuring(expression: str) -> Label:
    """The label of exchanges of a measure of tensors, such as a norm, as a user writes it."""
    return Label(Purpose.MEASURE, text_number(expression), names=Names(measure=expression))


moving: ContextVar[Label] = ContextVar("moving", default=Label())  # noqa: B039 (it cannot change)
"""The label of the collective that is being started; `Transfer` and `labelled` set it. Collectives read it, and know of
which model they are.
"""


@contextmanager
def labelled(label: Label) -> Iterator[None]:
    """What is exchanged inside, or in a function that this decorates, has this label."""
    before = moving.set(label)
    try:
        yield
    finally:
        moving.reset(before)
