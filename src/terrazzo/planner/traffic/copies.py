"""What comes and goes between the device, the host's memory and its disks in one optimizer step.

The engine's moves, see `terrazzo.engine.bucket`, `gradient` and `update`: resting weights are fetched before each
gather, gradients go to their tier once they are reduced, and an update happens where the optimizer's state lies.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.engine.recipe import Tiers
from terrazzo.planner.formulas import FORMULAS, Formula
from terrazzo.planner.machine.links import Move
from terrazzo.planner.memory.placement import Placement
from terrazzo.planner.memory.states import Space, spaces
from terrazzo.planner.model.shapes import UnitShape

__all__ = ["unit_copies"]

FORMULAS |= {
    "traffic.offload": Formula(
        "elements of this rank's shard * bytes_per_element, for each copy between device, host and disk",
        "ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; terrazzo/engine/offload/update.py",
    ),
}


def unit_copies(unit: UnitShape, placement: Placement, root: bool) -> tuple[Move, ...]:
    """The copies of one unit, by `when` as in `Move`. The root unit's weights are not fetched twice."""
    if placement.tiers == Tiers():
        return ()
    found: list[Move] = []
    for space in spaces(unit, placement):
        found += _weights(space, root)
        if space.trainable:
            found += [*_gradients(space), *_update(space)]
    return tuple(move for move in found if move.sent_bytes)


def _weights(space: Space, root: bool) -> Iterator[Move]:
    placement = space.placement
    held = space.numel(placement.weight) * space.weight_dtype.itemsize
    yield from _fetched(placement.tiers.weight, "weights", "forward", held)
    if not root and placement.between == placement.weight:
        yield from _fetched(placement.tiers.weight, "weights", "backward", held)


def _gradients(space: Space) -> Iterator[Move]:
    """Sums of earlier micro-batches go no further than the host's memory, and come back to be added to."""
    placement, itemsize = space.placement, space.placement.precision.accumulate.itemsize
    if placement.tiers.grad == "device":
        return
    if placement.grad:
        partial = space.numel(placement.grad) * itemsize
        yield _copy("gradients to the host", "reduce", partial)
        yield _copy("gradients to the device", "reduce", partial)
    finished = space.numel(placement.optim) * itemsize
    yield _copy("gradients to the host", "last", finished)
    if placement.tiers.grad == "nvme":
        yield _copy("gradients to disk", "last", finished, "disk")


def _update(space: Space) -> Iterator[Move]:
    placement, precision, owned = space.placement, space.placement.precision, space.numel(space.placement.optim)
    tiers, recipe = placement.tiers, placement.optimizer
    gradients = owned * precision.accumulate.itemsize
    if tiers.grad == "nvme":
        yield _copy("gradients from disk", "update", gradients, "disk")
    if tiers.optim == "device" and tiers.grad != "device":
        yield _copy("gradients to the device", "update", gradients)
    if tiers.optim != "device" and tiers.grad == "device":
        yield _copy("gradients to the host", "update", gradients)
    if tiers.optim == "nvme":
        moments = recipe.moments * (recipe.moment_bytes or precision.moments.itemsize)
        state = owned * (precision.master.itemsize + moments)
        yield _copy("optimizer state from disk", "update", state, "disk")
        yield _copy("optimizer state to disk", "update", state, "disk")
    if space.has_own_master or placement.weight != placement.optim:
        yield from _new_weights(space)


def _new_weights(space: Space) -> Iterator[Move]:
    """From where they were updated to where they rest; less split ones are gathered on the device first."""
    placement = space.placement
    weight, optim, itemsize = placement.tiers.weight, placement.tiers.optim, space.weight_dtype.itemsize
    gathered = weight != "device" and placement.weight != placement.optim
    updated = space.numel(placement.optim) * itemsize
    resting = space.numel(placement.weight) * itemsize
    if optim != "device" and (weight == "device" or gathered):
        yield _copy("updated weights to the device", "update", updated)
    if weight != "device" and (optim == "device" or gathered):
        yield _copy("updated weights to the host", "update", resting)
    if weight == "nvme":
        yield _copy("updated weights to disk", "update", resting, "disk")


def _fetched(tier: str, what: str, when: str, count_bytes: float) -> Iterator[Move]:
    if tier != "device":
        yield _copy(f"{what} to the device", when, count_bytes)
    if tier == "nvme":
        yield _copy(f"{what} from disk", when, count_bytes, "disk")


def _copy(what: str, when: str, count_bytes: float, link: str = "pcie") -> Move:
    return Move("copy", what, when, count_bytes, None, link)
