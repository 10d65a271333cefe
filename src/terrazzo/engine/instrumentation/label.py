"""What an exchange between ranks moves, so that two which do not belong together raise.

Ranks issue their exchanges in one order that all of them share (see `order`). Should they ever not, chunks of different
units could meet, of the same size and without an error. So each exchange says what it is for: in its messages, or where
those have no room for it (NCCL) in a checksum that ranks compare when they meet (see `pass_end`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from terrazzo.engine.instrumentation.places import PlacesDiffer, RankPlace, apart_text
from terrazzo.errors import RanksApart

__all__ = [
    "RUN_ALL_EXPERTS",
    "RUN_THE_SAME",
    "Label",
    "Names",
    "Purpose",
    "calling",
    "labelled",
    "measuring",
    "moves_a_unit",
    "moving",
    "of_all_ranks",
    "title_of",
]

RUN_THE_SAME = (
    "Every rank must run the same number of forwards, backwards and steps, with the same ones inside "
    "'with tz.accumulate(model)'; what their data lets them skip inside of the model may differ."
)
"""The edit that they ask for, of passes and steps; those below are of other exchanges."""
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
_CALLS = (
    "model.state_dict()",
    "model.load_state_dict(state)",
    "optimizer.state_dict()",
    "optimizer.load_state_dict(state)",
    "tz.shard(model, optimizer)",
    "tz.attach(model, optimizer)",
    "tz.parallelize(model, mesh)",
    "tz.step(model, micro_batches, loss_fn)",
    "optimizer.step()",
    "tz.EMA(model)",
    "ema.swapped()",
    "the end of 'with ema.swapped()'",
    "tz.save_pretrained(model, folder)",
    "tz.checkpoint.load_weights(model, source)",
    "tz.checkpoint.check_replicas(model)",
    "the end of 'with tz.gathered(model, write=True)'",
    "the end of 'with tz.gathered(model, write=\"first rank\")'",
)
"""Calls to be made on every rank. The first four have names under which plain PyTorch lets one rank alone call."""
_PURPOSE_BITS, _INDEX_BITS = 5, 24
P = ParamSpec("P")
T = TypeVar("T")


class Purpose(IntEnum):
    """Why something is exchanged; `_ROWS` has the rest about each."""

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


@dataclass(frozen=True)
class Names:
    """The names of what labels number, as far as this rank knows; each kind of thing has its own.

    Attributes:
        units: of the model.
        modules: that exchange activations.
        experts: modules of experts.
        measure: the expression that this rank measures.
    """

    units: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    measure: str = ""


def title_of(name: str) -> str:
    """The words for the unit of that name in messages."""
    return f"unit {name!r}" if name else "the root unit"


class _Things(NamedTuple):
    """What the `index` of a label is the number of: the names that are known, how one is said, and a number alone."""

    known: Callable[[Names], Mapping[int, str]]
    said: Callable[[str], str]
    unknown: str


def _number_of(expression: str) -> int:
    return zlib.crc32(expression.encode()) >> (32 - _INDEX_BITS)


_UNITS = _Things(lambda names: dict(enumerate(names.units)), title_of, "unit {}")
_MODULES = _Things(lambda names: dict(enumerate(names.modules)), repr, "layer {}")
_EXPERTS = _Things(lambda names: dict(enumerate(names.experts)), repr, "module {}")
_OF_CALLS = _Things(lambda names: dict(enumerate(_CALLS)), str, "call {}")
_MEASURES = _Things(lambda names: {_number_of(names.measure): names.measure}, str, "another measure")


class _Row(NamedTuple):
    """What there is to say of a purpose.

    Attributes:
        words: for an exchange, with `{what}` it moves and the `{number}` of its pass.
        edit: what errors ask for where others are elsewhere.
        of: what the label's `index` is the number of; None: of nothing.
    """

    words: str
    edit: str
    of: _Things | None = None


_OF_UNIT = "the weights of {what}"
_ROWS = {
    Purpose.AGREEMENT: _Row("an agreement, as on what all ranks are given", _CALL_EVERYWHERE),
    Purpose.FORWARD: _Row(f"{_OF_UNIT} for training forward {{number}}", RUN_THE_SAME, _UNITS),
    Purpose.EVALUATION: _Row(f"{_OF_UNIT} for forward {{number}}, without gradients", RUN_THE_SAME, _UNITS),
    Purpose.BACKWARD: _Row(f"{_OF_UNIT} for backward {{number}}", RUN_THE_SAME, _UNITS),
    Purpose.STRAY: _Row(f"{_OF_UNIT}, which came in another order than before", RUN_THE_SAME, _UNITS),
    Purpose.OUTSIDE: _Row(f"{_OF_UNIT} outside of the model's forward and backward", RUN_THE_SAME, _UNITS),
    Purpose.GRADIENT: _Row("the gradient of {what} in backward {number}, the last of its step", RUN_THE_SAME, _UNITS),
    Purpose.PARTIAL: _Row(
        "the gradient of {what} in backward {number}, inside of 'with tz.accumulate(model)'", RUN_THE_SAME, _UNITS
    ),
    Purpose.UPDATED: _Row("the updated weights of {what}", RUN_THE_SAME, _UNITS),
    Purpose.END_OF_FORWARD: _Row("the end of forward {number}", RUN_THE_SAME),
    Purpose.END_OF_BACKWARD: _Row("the end of backward {number}", RUN_THE_SAME),
    Purpose.EXPERTS: _Row("rows for the experts of {what}", RUN_ALL_EXPERTS, _EXPERTS),
    Purpose.EXPERTS_BACK: _Row("gradients of what the experts of {what} gave", RUN_ALL_EXPERTS, _EXPERTS),
    Purpose.CALL: _Row("{what}", _CALL_EVERYWHERE, _OF_CALLS),
    Purpose.MATRICES: _Row("matrices that an optimizer updates whole", RUN_THE_SAME),
    Purpose.OUTER: _Row("outer step {number}", RUN_THE_SAME),
    Purpose.ACTIVATIONS: _Row(
        "activations of {what}, exchange {number} along their axis", _RUN_THE_SAME_MODULES, _MODULES
    ),
    Purpose.ACTIVATIONS_BACK: _Row(
        "gradients of activations of {what}, exchange {number} along their axis", _RUN_THE_SAME_MODULES, _MODULES
    ),
    Purpose.LOSS: _Row("a loss of parts of the vocabulary, exchange {number}", _RUN_THE_SAME_MODULES),
    Purpose.NORM: _Row("the norm of all gradients", _CALL_EVERYWHERE),
    Purpose.MEASURE: _Row("{what}", _MEASURE_THE_SAME, _MEASURES),
    Purpose.CHECKPOINT: _Row("a checkpoint", _CALL_EVERYWHERE),
}


def moves_a_unit(purpose: Purpose) -> bool:
    """Whether exchanges for it move weights or gradients of one unit, whose index is in their labels."""
    return _ROWS[purpose].of is _UNITS


@dataclass(frozen=True)
class Label:
    """One exchange.

    Attributes:
        index: the number of what is moved, where it is of one unit, module, call or measure.
        number: of the pass that it belongs to, or of the exchange of activations, counted on each rank from the start.
        names: by which this label is read, and those of other ranks.
    """

    purpose: Purpose = Purpose.AGREEMENT
    index: int = 0
    number: int = 0
    names: Names = Names()

    @property
    def code(self) -> int:
        """The label in 63 bits, equal on ranks that move the same."""
        return self.purpose | self.index << _PURPOSE_BITS | self.number << (_PURPOSE_BITS + _INDEX_BITS)

    def of_code(self, code: int) -> Label:
        """Another rank's label, with the names that this one knows."""
        purpose, rest = Purpose(code % (1 << _PURPOSE_BITS)), code >> _PURPOSE_BITS
        return replace(self, purpose=purpose, index=rest % (1 << _INDEX_BITS), number=rest >> _INDEX_BITS)

    @property
    def edit(self) -> str:
        """What errors ask for where other ranks are elsewhere."""
        return _ROWS[self.purpose].edit

    def place(self, detail: str = "") -> RankPlace:
        """Where a rank is that comes to this exchange."""
        return RankPlace(str(self), self.edit, detail, self.code)

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
        words, _, of = _ROWS[self.purpose]
        name = None if of is None else of.known(self.names).get(self.index)
        what = "" if of is None else of.unknown.format(self.index) if name is None else of.said(name)
        return words.format(what=what, number=self.number)


def calling(call: str) -> Label:
    """The label of exchanges of one of `_CALLS`."""
    return Label(Purpose.CALL, _CALLS.index(call))


def measuring(expression: str) -> Label:
    """The label of exchanges of a measure of tensors, such as a norm, as a user writes it."""
    return Label(Purpose.MEASURE, _number_of(expression), names=Names(measure=expression))


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


def of_all_ranks(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """What a function exchanges, and does not name otherwise, is of that one of `_CALLS`."""
    label = calling(call)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def of_all(*args: P.args, **kwargs: P.kwargs) -> T:
            with labelled(label):
                return function(*args, **kwargs)

        return of_all

    return decorate
