"""State of a sharded model as checkpoints ask for it: what there is, in pieces, and set again from such pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.partition.box import Box
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

__all__ = ["ModelState", "ParameterInfo"]

AllOrNone = Callable[[Callable[[], None]], None]


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
