"""What comes and goes between the device, the host's memory and its disks in one optimizer step.

The engine's moves, see `terrazzo.engine.bucket`, `gradient` and `update`: resting weights are fetched before each
gather, gradients go to their tier once they are reduced, and an update happens where the optimizer's state lies.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.engine.recipe import Tiers
from terrazzo.planner.formulas import FORMULAS, Formula
from terrazzo.planner.machine.links import Move
from terrazzo.planner.memory.rules import Rules
from terrazzo.planner.memory.states import Space, spaces
from terrazzo.planner.model.shapes import UnitShape

__all__ = ["unit_copies"]

FORMULAS |= {
    "traffic.offload": Formula(
        "elements of this rank's shard * bytes_per_element, for each copy between device, host and disk",
        "ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; terrazzo/engine/offload/update.py",
    ),
}


def unit_copies(unit: UnitShape, rules: Rules, root: bool) -> tuple[Move, ...]:
    """The copies of one unit, by `when` as in `Move`. The root unit's weights are not fetched twice."""
    if rules.tiers == Tiers():
        return ()
    found: list[Move] = []
    for space in spaces(unit, rules):
        found += _weights(space, root)
        if space.trainable:
            found += [*_gradients(space), *_update(space)]
    return tuple(move for move in found if move.sent_bytes)


def _weights(space: Space, root: bool) -> Iterator[Move]:
    rules = space.rules
    held = space.numel(rules.weight) * space.weight_dtype.itemsize
    yield from _fetched(rules.tiers.weight, "weights", "forward", held)
    if not root and rules.between == rules.weight:
        yield from _fetched(rules.tiers.weight, "weights", "backward", held)


def _gradients(space: Space) -> Iterator[Move]:
    """Sums of earlier micro-batches go no further than the host's memory, and come back to be added to."""
    rules, itemsize = space.rules, space.rules.precision.accumulate.itemsize
    if rules.tiers.grad == "device":
        return
    if rules.grad:
        partial = space.numel(rules.grad) * itemsize
        yield _copy("gradients to the host", "reduce", partial)
        yield _copy("gradients to the device", "reduce", partial)
    finished = space.numel(rules.optim) * itemsize
    yield _copy("gradients to the host", "last", finished)
    if rules.tiers.grad == "nvme":
        yield _copy("gradients to disk", "last", finished, "disk")


def _update(space: Space) -> Iterator[Move]:
    rules, precision, owned = space.rules, space.rules.precision, space.numel(space.rules.optim)
    tiers, recipe = rules.tiers, rules.optimizer
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
    if space.has_own_master or rules.weight != rules.optim:
        yield from _new_weights(space)


def _new_weights(space: Space) -> Iterator[Move]:
    """From where they were updated to where they rest; less split ones are gathered on the device first."""
    rules = space.rules
    weight, optim, itemsize = rules.tiers.weight, rules.tiers.optim, space.weight_dtype.itemsize
    gathered = weight != "device" and rules.weight != rules.optim
    updated = space.numel(rules.optim) * itemsize
    resting = space.numel(rules.weight) * itemsize
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
