"""What each rank keeps of a model: weights, gradients, master weights and moments, by the places of a `Plan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from terrazzo.engine.plan.spec import Pass
from terrazzo.planner.formulas import Formula, Term
from terrazzo.planner.memory.buckets import PlannedBucket, buckets
from terrazzo.planner.memory.placement import Placement, placed_units, placement_of
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "Phase", "UnitStates", "state_terms", "unit_states"]

FORMULAS = {
    "memory.weights": Formula(
        "sum over units of padded elements / ranks of `weight` x bytes of the resting weights; where they are split as "
        "the optimizer's and only a cast away, master weights serve as both",
        "arXiv 1910.02054, section 3; terrazzo/engine/plan/spec.py",
    ),
    "memory.gradients": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `accumulate`, from the end of "
        "backward to zero_grad",
        "arXiv 1910.02054, section 3; terrazzo/engine/paper/bill.py",
    ),
    "memory.master": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `master`, unless it is the weight",
        "arXiv 1710.03740; terrazzo/engine/plan/spec.py",
    ),
    "memory.moments": Formula(
        "tensors per element x held trainable elements / ranks of `optim` x bytes of `moments`, and one step count for "
        "every run of parameters that share settings",
        "arXiv 1412.6980; terrazzo/engine/paper/bill.py",
    ),
}

Phase = tuple[bool, int]

STATE_OF = {"weights": "weight", "gradients": "grad", "master": "master", "moments": "moments"}
"""The state that each term counts."""


@dataclass(frozen=True)
class UnitStates:
    """Bytes of one unit on one rank that come and go in a step, on the device.

    Attributes:
        finished: gradients from the end of backward on.
        full: gathered weights beside those at rest; 0 where modules read the resting weights themselves.
        held: kept between forward and backward in place of the full weights; `keep` where those stay instead.
        pending: an unreduced gradient on its way to the wire, `pending_local` one that only adds up on this rank.
        partial: a micro-batch's reduced sum at the `grad` place.
        reduction: of a last micro-batch, for each collective in turn: whether the unreduced gradient is still held
            while it is in flight, and bytes held beside. `early_reduction`: of an earlier micro-batch.
        largest_grad: of a single parameter, as autograd makes it.
        optim_numel: trainable elements that this rank updates.
        copied: the gradients of other stages that have the same parameters, as they come to be added.
        apart: new weights that are gathered on the device on their way to where they rest, of one space at a time.
    """

    finished: int
    full: int
    held: int
    keep: bool
    regathered: bool
    pending: int
    pending_local: int
    partial: int
    reduction: tuple[Phase, ...]
    early_reduction: tuple[Phase, ...]
    largest_grad: int
    optim_numel: int
    trainable: bool
    apart: int = 0
    copied: int = 0


@lru_cache(maxsize=8192)
def unit_states(unit: UnitShape, placement: Placement) -> UnitStates:
    """The bytes of one such unit. The root's weights stay from forward to backward."""
    found = buckets(unit, placement)
    trained = [bucket for bucket in found if bucket.trainable]
    precision, owned = placement.precision, sum(bucket.numel(bucket.optim_axes) for bucket in trained)
    largest = max((bucket.share(tensor) for bucket in trained for tensor in bucket.tensors), default=0)
    return UnitStates(
        finished=owned * precision.accumulate.itemsize * (placement.tiers.grad == "device"),
        full=sum(bucket.full_bytes for bucket in found),
        held=sum(bucket.held_bytes for bucket in found),
        keep=any(bucket.keeps_full and not bucket.resident for bucket in found),
        regathered=any(bucket.regathered for bucket in found),
        pending=sum(bucket.pending_bytes(Pass.REDUCES) for bucket in trained),
        pending_local=sum(bucket.pending_bytes(Pass.ADDS) for bucket in trained),
        partial=sum(bucket.partial_bytes for bucket in trained),
        reduction=_side_by_side([_phases(bucket, last=True) for bucket in trained]),
        early_reduction=_side_by_side([_phases(bucket, last=False) for bucket in trained]),
        largest_grad=largest * precision.compute.itemsize,
        optim_numel=owned,
        trainable=bool(trained),
        apart=max(bucket.apart_bytes for bucket in found),
        copied=sum(bucket.pending_bytes(Pass.ADDS) * max(0, len(bucket.stages) - 1) for bucket in trained),
    )


def _phases(bucket: PlannedBucket, last: bool) -> tuple[Phase, ...]:
    """What is held while each collective of a bucket's reduction is in flight."""
    reduction = bucket.sums.of(last)
    phases = [(True, move.received_bytes) for move in reduction.partial]
    for move in reduction.finish:
        received = [move.received_bytes] + [0] * (move.steps - 1)
        phases += [(not reduction.partial, reduction.beside_bytes + one) for one in received]
    if bucket.on_host or not phases:
        return tuple(phases)
    return ((True, max(beside for _, beside in phases)),)  # on CUDA a chain is waited for as a whole


def _side_by_side(chains: list[tuple[Phase, ...]]) -> tuple[Phase, ...]:
    """Phases of buckets that are reduced one after the other, as if at once: never less than what is held."""
    longest = max(map(len, chains), default=0)
    steps = [[chain[index] for chain in chains if index < len(chain)] for index in range(longest)]
    return tuple((any(held for held, _ in step), sum(extra for _, extra in step)) for step in steps)


# -- terms ---------------------------------------------------------------------------------------------------------


def state_terms(setup: Setup, stage: int = 0, tier: str | None = None, updated: bool = False) -> tuple[Term, ...]:
    """Weights, gradients, master weights and moments of a rank of `stage`, in bytes.

    Of a bare number of parameters the gradients are those of the ZeRO paper: kept at the plan's `grad` place.

    Args:
        tier: count only what lies there; None: wherever it lies.
        updated: count only what changes in a step.
    """
    if setup.model.bare:
        return _bare_terms(setup, tier)
    values = dict.fromkeys(STATE_OF, 0.0)
    for unit, count, placement in placed_units(setup, stage):
        for bucket in buckets(unit, placement):
            for name, state in STATE_OF.items() if bucket.trainable or not updated else ():
                if state in bucket.resting and tier in (None, bucket.resting[state][0]):
                    values[name] += count * bucket.resting[state][1]
    elements = float(sum(unit.numel * count for unit, count, _ in placed_units(setup, stage)))
    return tuple(_term(name, value, elements, placement_of(setup)) for name, value in values.items())


def _bare_terms(setup: Setup, tier: str | None) -> tuple[Term, ...]:
    numel, precision = setup.model.numel / (setup.mesh.tp * setup.mesh.pp), setup.precision
    placement = placement_of(setup)
    own, recipe = numel / placement.ranks(placement.plan.optim.axes), setup.optimizer
    moment = precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
    same = precision.weight == precision.master
    weight, grad, optim = (
        1.0 if tier is None else place.shares.get(tier, 0.0)
        for place in (setup.plan.weight, setup.plan.grad, setup.plan.optim)
    )
    values = {
        "weights": weight * numel / placement.ranks(placement.plan.weight.axes) * precision.weight.itemsize,
        "gradients": grad * numel / placement.ranks(placement.plan.grad.axes) * precision.accumulate.itemsize,
        "master": 0.0 if same else optim * own * precision.master.itemsize,
        "moments": optim * own * moment * recipe.moments,
    }
    return tuple(_term(name, value, numel, placement) for name, value in values.items())


def _term(name: str, value: float, elements: float, placement: Placement) -> Term:
    inputs = {
        "elements": elements,
        "tp": float(placement.tp),
        "ranks of weight": float(placement.ranks(placement.plan.weight.axes)),
        "ranks of optim": float(placement.ranks(placement.plan.optim.axes)),
        "bytes per element": value / elements if elements else 0.0,
    }
    return Term(name, value, value, f"memory.{name}", inputs)
