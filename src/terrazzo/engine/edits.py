"""What a user does to a model's parameters beside training them: noticed, taken over or refused.

A parameter is a view of its bucket's flat memory. What is written into it is in that memory already, and has to reach
the master weight; `data` of its own has to be copied there first. One that has been frozen or replaced would not be
trained, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.buffer import view
from terrazzo.engine.layout import Slot
from terrazzo.engine.parameter import watch_data
from terrazzo.engine.partition import Member
from terrazzo.errors import Misuse

__all__ = ["Edits"]


class Edits:
    """The edits of one bucket's parameters.

    Args:
        flat: the full weights that the parameters are views of.
        watches_data: whether what is written by way of `parameter.data` matters too, which leaves no trace.

    Attributes:
        asked: names of parameters whose `.data` somebody has asked for, if that matters. They stay, as who has it may
            write to it at any time.
    """

    def __init__(self, members: Sequence[Member], slots: Sequence[Slot], flat: Tensor, watches_data: bool) -> None:
        self._members, self._slots, self._flat = members, slots, flat
        self._trainable = members[0].trainable
        self.asked: set[str] = set()
        for member in members if watches_data else ():
            watch_data(member.parameter, self.asked)
        self._versions = self._current()
        self._places = [
            (member, slot, registered, attribute, slot.offset * flat.dtype.itemsize if slot.numel else 0)
            for slot, member in zip(slots, members, strict=True)
            for registered, attribute in member.registered
        ]

    def _current(self) -> list[int]:
        return [member.parameter._version for member in self._members]

    def written(self) -> list[str]:
        """Names of the parameters that have been written to in place since this was last asked."""
        before, self._versions = self._versions, self._current()
        if before == self._versions:
            return []
        changed = zip(self._members, before or [-1] * len(self._members), self._versions, strict=True)
        return [member.name for member, then, now in changed if then != now]

    def check(self, present: bool) -> None:
        """Notice what has been done to the parameters themselves.

        Other `data` of the same kind is taken over, as if written in place, where weights are `present`.

        Raises:
            Misuse: for parameters that have been frozen, unfrozen or replaced, and for other `data` in any other case.
        """
        trainable, start = self._trainable, self._flat.data_ptr()
        for member, slot, registered, attribute, offset_bytes in self._places:
            parameter = member.parameter
            if (
                parameter.requires_grad is not trainable
                or registered.get(attribute) is not parameter
                or parameter.data_ptr() != start + offset_bytes
            ):
                self._check_kept(member, registered, attribute)
                if slot.numel:
                    self._take_data(member, slot, present)

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

    def _take_data(self, member: Member, slot: Slot, present: bool) -> None:
        """A parameter has been given other `data`: take over the values, and give it back its place."""
        flat, parameter = self._flat, member.parameter
        here, now = (flat.dtype, flat.device, slot.shape), (parameter.dtype, parameter.device, tuple(parameter.shape))
        if here != now or not present:
            raise Misuse(
                f"{member.name!r} has been given other data, {_described(*now)}; sharded, it is a view of the engine's "
                f"memory, {_described(*here)}. Write values of that kind into it inside "
                "'with tz.gathered(model, write=True):', and convert modules before tz.shard."
            )
        with torch.no_grad():
            place = view(flat, slot)
            place.copy_(parameter.detach())
            parameter.data = place
        self._versions = []  # the same as written to in place


def _described(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape} on {device}"
