"""State of a sharded model as it is saved and restored: pieces of it, and state dicts that are loaded."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.unit_members import parameters_by_names
from terrazzo.engine.plan.layout import Slot
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.dtensors import is_dtensor, whole_dtensor
from terrazzo.engine.states.buffers_and_extra_state import PersistentBuffer
from terrazzo.engine.states.pieces import (
    Piece,
    copied_pieces,
    optimizer_pieces,
    require_known_states,
    state_pieces,
)
from terrazzo.engine.states.restore import StateReader, restore_optimizer, restore_state
from terrazzo.engine.states.saved_states import SavedState, saved_states, saved_weights
from terrazzo.engine.states.state_names import first_of
from terrazzo.errors import BadInput, RanksApart
from terrazzo.messages import listed

__all__ = ["ModelState", "ParameterInfo"]

AllOrNone = Callable[[Callable[[], None]], None]
_NamedBuffer = tuple[PersistentBuffer, str | None]
"""A buffer, and the name under which a state dict has it; None where it does not."""


@dataclass(frozen=True)
class ParameterInfo:
    """Facts about one parameter for whatever saves it.

    Attributes:
        names: all that it has in the model, its own first.
        box: what this rank has of the parameter.
        dtype: of its weight, the master weight where there is one.
        group: number of its param group among those of all optimizers; -1 for none.
        states: of what an optimizer keeps for it by kind, the number of elements and their dtype, or None for the dtype
            of what is not per element. None where nothing steps it.
    """

    names: tuple[str, ...]
    box: Box
    dtype: torch.dtype
    group: int
    states: Mapping[str, tuple[int, torch.dtype | None]] | None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.box.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def per_element(self, kind: str) -> bool:
        """Whether a state has a value for each element; weights and their averages have."""
        return self.states is None or self.states.get(first_of(kind), (self.numel, self.dtype))[1] is not None


class ModelState:
    """All state of a sharded model and its optimizers, by the names that parameters have in the model.

    Where ranks have stages of the model, it is that of this rank's; `parameter_table` has the parameters of all.

    Raises:
        Misuse: for a model that is not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self._names = list(parameters_by_names(model))

    def parameters(self) -> list[ParameterInfo]:
        """List each parameter, with what there is to save of it."""
        return [self._info(bucket, index) for bucket in self._engine.buckets() for index in range(len(bucket.members))]

    def _info(self, bucket: Bucket, index: int) -> ParameterInfo:
        slot, group = bucket.slots[index], bucket.members[index].group
        box = bucket.box(slot)
        numel = math.prod(box.shape)
        states: dict[str, tuple[int, torch.dtype | None]] | None = None
        if bucket.spec.trainable and group >= 0:
            shown = bucket.spec.precision.shown_moments
            states = {
                kind: (numel, shown) if state.per_element else (math.prod(state.shape), None)
                for kind, state in self._engine.drivers.templates[group].items()
            }
        dtype = bucket.exact.dtype if bucket.spec.trainable else bucket.weight.dtype
        return ParameterInfo(slot.names, box, dtype, group, states)

    def pieces(self, with_optimizer: bool = True) -> Iterator[Piece]:
        """Yield this rank's share of all state; over all ranks each element comes once. Collective.

        Args:
            with_optimizer: whether states of those optimizers come too that `Drivers.drop_gone` has left.

        Raises:
            Misuse: for states that nothing would restore; `BadInput` on ranks that have none. Within a round of
                replicas that train by themselves, whose weights differ.
        """
        engine = self._engine
        engine.requires.round_ended("Saving a checkpoint")
        engine.requires.step_taken("Saving", reads="weights")
        if with_optimizer:
            engine.requires.step_taken("Saving", reads="states")
            engine.requires.own_weights("Saving the optimizer's state")
            if engine.average is not None:
                engine.average.compare(engine.axes)
        engine.settle()
        drivers = engine.drivers.stepping() if with_optimizer else []
        if drivers:
            all_or_none(engine.axes, lambda: require_known_states(drivers))
        for saved in self._weights():
            yield from state_pieces(saved, saved.share)
        for driver in drivers:
            yield from optimizer_pieces(driver)
        for saved in self._beside_weights() if with_optimizer else ():
            yield from state_pieces(saved, saved.share)

    def _weights(self) -> Iterator[SavedState]:
        return saved_weights(self._engine.buckets())

    def _beside_weights(self) -> Iterator[SavedState]:
        return saved_states(self._engine.buckets(), self._engine.averages)

    def copies(self) -> Iterator[tuple[tuple[str, ...], list[Piece]]]:
        """Yield mesh axes, and all states that every rank along these axes holds the same of. Collective."""
        self._engine.settle()
        self._engine.drivers.drop_gone()  # ranks have to hold as many
        saved = [*self._weights(), *self._beside_weights()]
        yield from copied_pieces(saved, self._engine.trainable(), self._engine.drivers.stepping())

    def restore(self, source: StateReader, with_optimizer: bool = True, together: AllOrNone | None = None) -> None:
        """Set the weights, and by default the optimizers' state, from `source`. Collective.

        Args:
            source: may come from any plan and number of ranks.
            together: does what can fail on one rank alone, or raises on all; by default as `tz.shard` does.
        """
        together = together or functools.partial(all_or_none, self._engine.axes)
        together(lambda: self._fill(source, with_optimizer))
        self._engine.publish()

    def _fill(self, source: StateReader, with_optimizer: bool) -> None:
        """Set this rank's own ranges; weights at rest have to follow, on all ranks."""
        engine = self._engine
        engine.requires.own_weights("Loading a checkpoint")
        if not with_optimizer:
            engine.requires.step_taken("Loading weights")
        engine.settle()
        with torch.no_grad():
            for driver in engine.drivers:
                driver.off_device.forget(abandoned=True)  # a step that has begun, until all of it is restored
            for saved in [*self._weights(), *(self._beside_weights() if with_optimizer else ())]:
                restore_state(saved, source)
            engine.restart_round()
            for driver in engine.drivers:
                driver.off_device.restored("weights")
                if with_optimizer and driver.reference() is not None:
                    restore_optimizer(driver, source)
                    driver.off_device.restored("states")

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """All names of each parameter of the model, also of those that ranks with other stages have."""
        return self._names

    def missing(self, state: Mapping[str, Tensor]) -> set[str]:
        """Parameters of the model that `state` does not have, under any of their names."""
        return {names[0] for names in self._names if _name_in(state, names) is None}

    def load(self, state: Mapping[str, Tensor], buffers: Sequence[PersistentBuffer]) -> None:
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
        hashes = {}
        for bucket, slot, name in parameters:
            full, box = whole_dtensor(state[name]), bucket.box(slot)
            hashes[slot.name] = self._hashed(full)
            bucket.write(slot, full if box.is_all else box.of(full))
        for buffer, there in buffers:
            if there is not None:
                full = whole_dtensor(state[there])
                hashes[buffer.name] = self._hashed(full)
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
        if spread and self._engine.axes.stage_axis:
            raise BadInput(
                f"load_state_dict: {listed([*map(repr, spread)])} are DTensors, and this rank has stages of the model "
                "(pp): the others would have to gather them as well. Give full tensors."
            )

    def _hashed(self, full: Tensor) -> Tensor:
        """Digest that ranks compare of a full tensor, wherever each has it; 0 where no other has it."""
        axes = self._engine.axes
        return digest(full.cpu()) if axes.live(axes.same_stage) else torch.zeros((), dtype=torch.int64, device=HOST)


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


def _name_in(state: Mapping[str, Tensor], names: Sequence[str]) -> str | None:
    """Name, of several, under which something is in `state`; None where it is not there."""
    return next((name for name in names if name in state), None)
