"""What a user does to a model's parameters beside training them: noticed, taken over or refused.

A parameter is a view of its bucket's flat memory. What is written into it is in that memory already, and has to reach
the master weight; `data` of its own has to be copied there first. One that has been frozen or replaced would not be
trained, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.buffer import view
from terrazzo.engine.layout import Slot
from terrazzo.engine.parameter import Asked, watch_data
from terrazzo.engine.partition import Member
from terrazzo.errors import Misuse

__all__ = ["Edits", "take_data"]


@dataclass(frozen=True)
class Displaced:
    """A parameter that has been given other `data`, and its slot in the flat memory of the full weights.

    Attributes:
        present: whether those are there now.
    """

    edits: Edits
    member: Member
    flat: Tensor
    slot: Slot
    present: bool

    @property
    def place(self) -> Tensor:
        """Where its values belong; only while they are present."""
        return view(self.flat, self.slot)


class Edits:
    """The edits of one bucket's parameters.

    Args:
        flat: the full weights that the parameters are views of.
        watches_data: whether to keep what users ask for by way of `parameter.data`: a write to it leaves no trace, and
            other `data` must not change what it holds.

    Attributes:
        asked: by name of a parameter whose `.data` somebody has asked for, those that are still in use. The names stay,
            as memory that has been looked at once may be written to at any time.
    """

    def __init__(self, members: Sequence[Member], slots: Sequence[Slot], flat: Tensor, watches_data: bool) -> None:
        self._members, self._slots, self._flat = members, slots, flat
        self._trainable = members[0].trainable
        self.asked: Asked = {}
        for member in members if watches_data else ():
            watch_data(member.parameter, self.asked)
        self._versions = self._current()
        self._places = [
            (member, slot, registered, attribute, slot.offset * flat.dtype.itemsize if slot.numel else 0)
            for slot, member in zip(slots, members, strict=True)
            for registered, attribute in member.registered
        ]

    @property
    def flat_storage(self) -> int:
        """Where the memory of the full weights begins."""
        return self._flat.untyped_storage().data_ptr()

    def _current(self) -> list[int]:
        return [member.parameter._version for member in self._members]

    def written(self) -> list[str]:
        """Names of the parameters that have been written to in place since this was last asked."""
        before, self._versions = self._versions, self._current()
        if before == self._versions:
            return []
        changed = zip(self._members, before or [-1] * len(self._members), self._versions, strict=True)
        return [member.name for member, then, now in changed if then != now]

    def displaced(self, present: bool) -> list[Displaced]:
        """The parameters that have been given other `data`.

        Raises:
            Misuse: for parameters that have been frozen, unfrozen or replaced.
        """
        trainable, start = self._trainable, self._flat.data_ptr()
        found: list[Displaced] = []
        for member, slot, registered, attribute, offset_bytes in self._places:
            parameter = member.parameter
            if (
                parameter.requires_grad is not trainable
                or registered.get(attribute) is not parameter
                or parameter.data_ptr() != start + offset_bytes
            ):
                self._check_kept(member, registered, attribute)
                if slot.numel and not any(each.member is member for each in found):  # registered twice if tied
                    found.append(Displaced(self, member, self._flat, slot, present))
        return found

    def aliases(self) -> list[Tensor]:
        """What users have asked for by way of `.data` and still hold."""
        return [alias for held in self.asked.values() for alias in held.values()]

    def take(self, displaced: Displaced, value: Tensor) -> None:
        """Take over a parameter's `value`, as if written in place, and give it back its place."""
        place = displaced.place
        with torch.no_grad():
            place.copy_(value)
            displaced.member.parameter.data = place
        self._versions = []  # the same as written to in place

    def _check_kept(self, member: Member, registered: Mapping[str, Any], attribute: str) -> None:
        if member.parameter.requires_grad != self._trainable:
            raise Misuse(
                f"{member.name!r} had requires_grad={self._trainable} when the model was sharded and has "
                f"{member.parameter.requires_grad} now. Freeze or unfreeze parameters before tz.shard."
            )
        if registered.get(attribute) is not member.parameter:
            raise Misuse(
                f"{member.name!r} has been replaced or removed since the model was sharded, and what stands there now "
                "would not be trained. Write new values into the parameter itself, inside "
                "'with tz.gathered(model, write=True):', and change modules before tz.shard."
            )


def take_data(displaced: Sequence[Displaced], edits: Iterable[Edits]) -> None:
    """Take over other `data` that parameters have been given, as one change of all of them.

    In plain PyTorch the memory that a parameter had before stays as it was for those who hold it: a backup that is
    given back later. Here it is the engine's, so they get a copy of their own before it changes.

    Args:
        displaced: of all buckets of a model, since parameters may have been given each other's memory.
        edits: of those buckets.

    Raises:
        Misuse: before anything changes, for `data` of another kind, and for memory that parameters would share.
    """
    known = list(edits)
    engines = {each.flat_storage for each in known}
    for each in displaced:
        _check_kind(each)
    _check_own(displaced, engines)
    values = [each.member.parameter.detach() for each in displaced]
    values = [value.clone() if value.untyped_storage().data_ptr() in engines else value for value in values]
    aliases = [alias for each in known for alias in each.aliases()]
    for each in displaced:
        if held := [alias for alias in aliases if alias.data_ptr() == each.place.data_ptr()]:
            before = each.place.clone()
            for alias in held:
                alias.data = before
    for each, value in zip(displaced, values, strict=True):
        each.edits.take(each, value)


def _check_kind(displaced: Displaced) -> None:
    flat, parameter = displaced.flat, displaced.member.parameter
    here = flat.dtype, flat.device, displaced.slot.shape
    now = parameter.dtype, parameter.device, tuple(parameter.shape)
    if here != now or not displaced.present:
        raise Misuse(
            f"{displaced.member.name!r} has been given other data, {_described(*now)}; sharded, it is a view of the "
            f"engine's memory, {_described(*here)}. Write values of that kind into it inside "
            "'with tz.gathered(model, write=True):', and convert modules before tz.shard."
        )


def _check_own(displaced: Sequence[Displaced], engines: set[int]) -> None:
    """Refuse `data` that a parameter would share with another: their values would be copied, and then part."""
    taken: dict[int, str] = {}
    freed = {each.place.data_ptr() for each in displaced}
    for each in displaced:
        data, name = each.member.parameter, each.member.name
        start = data.data_ptr()
        of_engine = data.untyped_storage().data_ptr() in engines and start not in freed
        if of_engine or start in taken:
            other = repr(taken[start]) if start in taken else "another parameter"
            raise Misuse(
                f"{name!r} has been given the data of {other}, which does not tie parameters of a sharded model. "
                "Give it a copy, 'a.data = b.data.clone()', or tie the modules before tz.shard, 'a.weight = b.weight'."
            )
        taken[start] = name


def _described(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape} on {device}"
