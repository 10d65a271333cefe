"""Weights and buffers, given whole: a rank takes its part of each, and hears whether all were given the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.consensus.digest import compared_digest, digest
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.unit_members import parameters_by_names
from terrazzo.engine.plan.layout import Slot
from terrazzo.engine.runtime.dtensors import is_dtensor, whole_dtensor
from terrazzo.engine.states.buffers_and_extra_state import PersistentBuffer
from terrazzo.errors import BadInput, RanksApart
from terrazzo.messages import listed

__all__ = ["GivenWeights"]

_NamedBuffer = tuple[PersistentBuffer, str | None]
"""A buffer, and the name under which a state dict has it; None where it does not."""


class GivenWeights:
    """What a sharded model takes of the state dicts that it is given.

    Raises:
        Misuse: for a model that is not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self._names = list(parameters_by_names(model))

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """All names of each parameter of the model, also of those that ranks with other stages have."""
        return self._names

    def missing(self, state: Mapping[str, Tensor]) -> set[str]:
        """Parameters of the model that `state` does not have, under any of their names."""
        return {names[0] for names in self._names if _name_in(state, names) is None}

    def take(self, state: Mapping[str, Tensor], buffers: Sequence[PersistentBuffer]) -> None:
        """Set weights and buffers from full tensors by name, this rank keeping its own ranges. Collective.

        Args:
            state: may be lazy: one tensor at a time is looked up, for its shape before anything is changed, and then
                for its values. A parameter or buffer may come under any of its names. A DTensor is gathered, so all
                ranks must have it.
            buffers: those that the model has.

        Raises:
            BadInput: what is no tensor, has no values or another shape, here or on another rank; all are listed, and
                nothing is changed.
            RanksApart: on every rank, if names differ between ranks, before anything is changed; or other values,
                which are compared as they are written: a tensor is read once, and each rank has kept its own part.
            Misuse: within a round of replicas that train by themselves, before anything is changed.
        """
        engine = self._engine
        engine.requires.at_rest("load_state_dict()")
        engine.requires.round_ended("load_state_dict() came")
        named = [(b, slot, _name_in(state, slot.names)) for b in engine.buckets() for slot in b.slots]
        parameters = [(bucket, slot, name) for bucket, slot, name in named if name is not None]
        named_buffers = [(buffer, _name_in(state, buffer.names)) for buffer in buffers]
        shapes = {name: bucket.box(slot).shape for bucket, slot, name in parameters}
        shapes |= {name: tuple(buffer.tensor.shape) for buffer, name in named_buffers if name is not None}
        all_or_none(engine.axes, lambda: self._check_given(state, shapes))
        self._compare_names(state, named_buffers)
        engine.settle()
        with torch.no_grad():
            hashes = all_or_none(engine.axes, lambda: self._write(state, parameters, named_buffers))
        for driver in engine.drivers if not self.missing(state) else ():
            driver.off_device.restored("weights")
        engine.blocks.show_changed()
        differing = engine.axes.differing(hashes, engine.axes.same_stage)
        if engine.axes.anywhere(bool(differing), engine.axes.whole_mesh):
            raise RanksApart(
                "load_state_dict: the ranks were given other values of "
                f"{listed([*map(repr, differing)]) or 'what other stages have'}, and each has kept its own part. "
                f"{_GIVE_ALL}"
            )

    def _compare_names(self, state: Mapping[str, Tensor], buffers: Sequence[_NamedBuffer]) -> None:
        """Refuse state dicts whose names differ between ranks. Collective.

        Raises:
            RanksApart: on every rank.
        """
        axes = self._engine.axes
        names = {each[0]: _name_in(state, each) or "" for each in self._names}
        names |= {buffer.name: name or "" for buffer, name in buffers}
        found = {own: zlib.crc32(name.encode()) for own, name in names.items()}
        if differing := axes.differing(found, axes.whole_mesh):
            raise RanksApart(
                f"load_state_dict: the ranks were given other names; of {listed([*map(repr, differing)])} some ranks "
                f"alone have one. Nothing has been loaded. {_GIVE_ALL}"
            )

    def _write(
        self,
        state: Mapping[str, Tensor],
        parameters: Sequence[tuple[Bucket, Slot, str]],
        buffers: Sequence[_NamedBuffer],
    ) -> dict[str, Tensor]:
        """Write full tensors of `state`, of each parameter what this rank has, and return their digests by name."""
        hashes, axes = {}, self._engine.axes
        for bucket, slot, name in parameters:
            full, box = whole_dtensor(state[name]), bucket.box(slot)
            hashes[slot.name] = compared_digest(full, axes, axes.same_stage)
            bucket.write(slot, full if box.is_all else box.of(full))
        for buffer, there in buffers:
            if there is not None:
                full = whole_dtensor(state[there])
                hashes[buffer.name] = compared_digest(full, axes, axes.same_stage)
                buffer.tensor.copy_(full)
        return hashes

    def _check_given(self, state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse what is no full tensor of its shape, and such as ranks of other stages would have to help to read.

        Raises:
            BadInput: there; all are listed.
        """
        wrong, spread = list[str](), list[str]()
        for name, shape in shapes.items():
            value = state[name]  # which may read it from a file: once, and one at a time
            if fault := _fault(value, shape):
                wrong.append(f"{name} {fault}")
            elif is_dtensor(value):
                spread.append(name)
        if wrong:
            raise BadInput(
                f"load_state_dict: {len(wrong)} entries do not fit: {'; '.join(wrong)}. Give full tensors, from a model"
                " that was built as this one was."
            )
        self._check_tied(state, shapes)
        if spread and self._engine.axes.stage_axis:
            raise BadInput(
                f"load_state_dict: {listed([*map(repr, spread)])} are DTensors, and this rank has stages of the model "
                "(pp): the others would have to gather them as well. Give full tensors."
            )

    def _check_tied(self, state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse two values for one parameter, of which plain PyTorch keeps that of its last name.

        Raises:
            BadInput: there.
        """
        for names in self._names:
            first, *others = [name for name in names if name in state] or [""]
            for other in others if first in shapes else ():
                if not _alike(state[first], state[other]):
                    raise BadInput(
                        f"load_state_dict: {first!r} and {other!r} have different values, and are one parameter here, "
                        "tied. Nothing has been loaded. Leave out one of them, or shard a model that is not tied."
                    )


_GIVE_ALL = (
    "Give every rank the same state dict, or copy it into the weights on the first alone, inside 'with "
    'tz.gathered(model, write="first rank")\'.'
)


def _fault(value: object, shape: tuple[int, ...]) -> str | None:
    """Say why something cannot be loaded as a tensor of `shape`; None where it can."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, and no tensor"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)} and should be {shape}"
    return "is on the meta device, and has no values" if value.is_meta else None


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two entries for one parameter say the same; DTensors are not compared, which would be collective."""
    if one is other or not all(isinstance(each, Tensor) and not is_dtensor(each) for each in (one, other)):
        return True
    return one.shape == other.shape and torch.equal(digest(one), digest(other.to(one)))


def _name_in(state: Mapping[str, Tensor], names: Sequence[str]) -> str | None:
    """Name, of several, under which something is in `state`; None where it is not there."""
    return next((name for name in names if name in state), None)
