"""States of a sharded model whole again, one bucket after the other, so that nobody needs memory for all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from terrazzo.engine.buffer import Resting, view
from terrazzo.engine.links.label import Label, Purpose
from terrazzo.engine.links.transfer import Transfer
from terrazzo.engine.model.engine import engine_of
from terrazzo.engine.model.parts import refuse_parts
from terrazzo.engine.unit import Unit
from terrazzo.errors import BadInput, did_you_mean, listed

__all__ = ["gathered_state", "whole_weights"]


def gathered_state(unit: Unit, state: Resting) -> Tensor:
    """All elements of one state of a bucket of `unit`, in the memory of the mesh's device. Collective."""
    full = state.space.empty((), state.dtype)
    Transfer(full.gather(state), Label(Purpose.OUTSIDE, unit.index, names=unit.names)).finish()
    return full.data


def whole_weights(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a sharded model whole, one after the other; master weights where there are any. Collective.

    Memory: one bucket on the mesh's device. It is gathered again only where the order of `names` comes back to it.

    Args:
        names: of parameters, in the same order on every rank; by default each under its own name, bucket by bucket.

    Raises:
        BadInput: names that no parameter has, before anything is gathered.

    Yields:
        Name and full tensor, in the dtype that it is kept in: on the device, until the next one is asked for.
    """
    engine = engine_of(model)
    refuse_parts(engine.axes, "Reading weights whole")
    slots = [(unit, bucket, slot) for unit in engine.units for bucket in unit.buckets for slot in bucket.slots]
    places = {name: place for place in slots for name in place[2].names}
    wanted = [slot.name for _, _, slot in slots] if names is None else list(names)
    if unknown := [name for name in wanted if name not in places]:
        raise BadInput(
            f"whole_weights: {type(model).__name__} has no parameter {listed([*map(repr, unknown)], 5)}."
            f"{did_you_mean(unknown[0], places)} Give names of model.named_parameters(); buffers are whole in any case."
        )
    engine.settle()
    here, data = None, None
    for name in wanted:
        unit, bucket, slot = places[name]
        if here is not bucket:
            data = None  # before room is made for the next
            here, data = bucket, gathered_state(unit, bucket.master if bucket.trainable else bucket.weight)
        assert data is not None
        yield name, view(data, slot)
