"""Edits by users of a model's parameters, beside training: noticed, taken over or refused.

A parameter is a view of its bucket's flat memory. What is written into it is in that memory already, and has to reach
the master weight; `data` of its own has to be copied there first. One that has been frozen or replaced would not be
trained, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from terrazzo.engine.buckets.parameters.aliases import leave_memory
from terrazzo.engine.buckets.parameters.at_rest import plain_data
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.runtime.private_torch import set_versions
from terrazzo.errors import Misuse

__all__ = ["Edits", "copy_into_places"]


@dataclass(frozen=True)
class Watched:
    """A parameter as it was when the model was sharded.

    Attributes:
        place: its part of the full weights, in its shape; memory that may come and go.
        start_bytes: where that begins in the full weights.
        index: its number in the bucket.
    """

    member: Member
    place: Tensor
    start_bytes: int
    index: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.member.parameter


@dataclass(frozen=True)
class Displaced:
    """A parameter that has been given new `data`.

    Attributes:
        present: whether the full weights are there now.
    """

    edits: Edits
    watched: Watched
    present: bool


class Edits:
    """The edits of one bucket's parameters.

    Args:
        places: the part of each in the full weights, in its shape.
        flat: the full weights that the parameters are views of, 1-D.
        traced: whether what is written has to leave a trace, since nothing else would tell. `parameter.data`, through
            which it leaves none, then is `.detach()`.

    Attributes:
        data_taken: names of the parameters whose `.data` somebody has read, where it leaves none: memory that has been
            looked at once may be written to at any time.
        taken_over: names of the parameters, where they stay, whose written values masters have; until it is cleared.
    """

    def __init__(self, members: Sequence[Member], places: Iterable[Tensor], flat: Tensor, traced: bool) -> None:
        self._flat = flat
        self._watched = [
            Watched(member, place, int(place.storage_offset()) * flat.itemsize if place.numel() else 0, index)
            for index, (member, place) in enumerate(zip(members, places, strict=True))
        ]
        self._trainable = members[0].trainable
        self._traced, self.data_taken, self.taken_over = traced, set[str](), set[str]()
        self._views = [member.parameter for member in members]
        self._ahead = 0  # by how much their versions are, while they are put away
        self._versions = self._current()

    def alias_of(self, member: Member) -> Callable[[nn.Parameter], Tensor]:
        """What `.data` of a parameter gives, in place of torch's own."""
        return Tensor.detach if self._traced else functools.partial(_note_taken, self.data_taken, member.name)

    @property
    def flat(self) -> Tensor:
        """The full weights."""
        return self._flat

    @property
    def places(self) -> Iterator[Tensor]:
        """The parts of it that are its parameters'."""
        return (watched.place for watched in self._watched)

    def _current(self) -> list[int]:
        return [parameter._version - self._ahead for parameter in self._views]

    # Autograd compares a parameter's version with the one that it had when it was kept for backward.

    def put_away(self) -> None:
        """Note that values must not be read: a backward that does so, unannounced, raises before it touches them."""
        if not self._ahead:
            self._ahead = 1
            increment_version(self._views)

    def bring_back(self) -> None:
        """Note that values may be read again, by backward too: those of before, unless `outdate` was called."""
        if self._ahead:
            set_versions(self._views, self._current())
            self._ahead = 0

    def outdate(self) -> None:
        """Note that values have changed, as after a step in plain PyTorch: a backward that kept the old ones raises."""
        increment_version(self._views)
        self._versions = [version + 1 for version in self._versions]

    def forget_written(self) -> None:
        """Forget what has been written in place so far: it is known, or lost."""
        self._versions = self._current()

    def take_written(self) -> list[str]:
        """Names of the parameters that have been written to in place since this, or to forget it, was last asked."""
        before, self._versions = self._versions, self._current()
        if before == self._versions:
            return []
        changed = zip(self._watched, before, self._versions, strict=True)
        return [watched.member.name for watched, then, now in changed if then != now]

    def displaced(self, present: bool) -> list[Displaced]:
        """The parameters that have been given new `data`.

        Raises:
            Misuse: for parameters that have been frozen, unfrozen or replaced.
        """
        trainable, start = self._trainable, self._flat.data_ptr()
        displaced: list[Displaced] = []
        for watched in self._watched:
            parameter, place = watched.parameter, watched.place
            for registered, attribute in watched.member.registered:
                if parameter.requires_grad is not trainable or registered.get(attribute) is not parameter:
                    raise self._changed(watched.member)
            if place.numel() and (
                parameter.data_ptr() != start + watched.start_bytes
                or parameter.shape != place.shape
                or parameter.stride() != place.stride()
            ):
                displaced.append(Displaced(self, watched, present))
        return displaced

    def copy_into_place(self, watched: Watched, value: Tensor) -> None:
        """Take over a parameter's `value`, as if written in place, and give it back its place."""
        with torch.no_grad():
            watched.place.copy_(value)
            watched.parameter.data = watched.place
        self._versions[watched.index] -= 1  # the same as written to in place

    def move(self) -> None:
        """Follow full weights to other memory: the places of parameters, and the parameters that are in them."""
        for watched in self._watched:
            place, is_there = watched.place, watched.parameter.data_ptr() == watched.place.data_ptr()
            place.data = self._flat.as_strided(place.shape, place.stride(), place.storage_offset())
            if is_there:
                watched.parameter.data = place

    def _changed(self, member: Member) -> Misuse:
        if member.parameter.requires_grad != self._trainable:
            return Misuse(
                f"{member.name!r} had requires_grad={self._trainable} when the model was sharded and has "
                f"{member.parameter.requires_grad} now. Freeze or unfreeze parameters before tz.shard. To leave one "
                "out of steps, set its .grad to None on every rank between backward() and optimizer.step()."
            )
        return Misuse(
            f"{member.name!r} has been replaced or removed since the model was sharded, and what stands there now "
            "would not be trained. Write new values into the parameter itself, inside "
            "'with tz.gathered(model, write=True):', and change modules before tz.shard."
        )


def _note_taken(data_taken: set[str], name: str, parameter: nn.Parameter) -> Tensor:
    data_taken.add(name)
    return plain_data(parameter)


def copy_into_places(displaced: Sequence[Displaced], edits: Iterable[Edits], own: Sequence[Tensor]) -> None:
    """Take over new `data` that parameters have been given, as one change of all of them.

    In plain PyTorch the memory that a parameter had before stays as it was for those who hold it, be it by a view: a
    backup that is given back later. Here it is the engine's, so they get a copy of their own before it changes.

    Args:
        displaced: of all buckets of a model, since parameters may have been given each other's memory.
        edits: of those buckets.
        own: the engine's tensors in the memory of full weights.

    Raises:
        Misuse: before anything changes, for `data` of another kind, and for memory that parameters would share.
    """
    known = list(edits)
    engines = {each.flat.untyped_storage().data_ptr() for each in known}
    for each in displaced:
        _check_kind(each)
    _check_own(displaced, engines)
    values = [each.watched.parameter.detach() for each in displaced]
    values = [value.clone() if value.untyped_storage().data_ptr() in engines else value for value in values]
    places = [place for each in known for place in each.places]
    leave_memory([each.watched.place for each in displaced], [*own, *places, *values])
    for each, value in zip(displaced, values, strict=True):
        each.edits.copy_into_place(each.watched, value)


def _check_kind(displaced: Displaced) -> None:
    place, parameter, name = displaced.watched.place, displaced.watched.parameter, displaced.watched.member.name
    expected = place.dtype, place.device, tuple(place.shape)
    actual = parameter.dtype, parameter.device, tuple(parameter.shape)
    if expected == actual and not displaced.present:
        raise Misuse(
            f"{name!r} has been given other data between tz.gathered, or a forward, and the next use "
            "of the weights, which this plan splits: it would be lost. Give it inside "
            "'with tz.gathered(model, write=True):', or take a plan that keeps weights whole, such as zero2."
        )
    if expected != actual:
        raise Misuse(
            f"{name!r} has been given other data, {_described(*actual)}; sharded, it is a view of the "
            f"engine's memory, {_described(*expected)}. Write values of that kind into it inside "
            "'with tz.gathered(model, write=True):', and convert modules before tz.shard."
        )


def _check_own(displaced: Sequence[Displaced], engines: set[int]) -> None:
    """Refuse `data` that a parameter would share with another: their values would be copied, and then part."""
    taken: dict[int, str] = {}
    freed = {each.watched.place.data_ptr() for each in displaced}
    for each in displaced:
        data, name = each.watched.parameter, each.watched.member.name
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
