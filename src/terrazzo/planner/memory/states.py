"""What each rank keeps of a model: weights, gradients, master weights and moments, by the places of a `Plan`."""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.buckets import buckets
from terrazzo.planner.layout.placement import Placement, placed_units, placement_of
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "STATE_OF", "CountedState", "state_terms"]

FORMULAS = {
    "memory.weights": Formula(
        "sum over units of padded elements / ranks of `weight` x bytes of the resting weights; where they are split as "
        "the optimizer's and only a cast away, master weights serve as both; of a frozen matrix in 4 bits 34 bytes for "
        "64 elements",
        "arXiv 1910.02054, section 3; terrazzo/engine/plan/bucket_bytes.py",
    ),
    "memory.gradients": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `accumulate`, from the end of "
        "backward to zero_grad",
        "arXiv 1910.02054, section 3; terrazzo/engine/dry_run/bill.py",
    ),
    "memory.master": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `master`, unless it is the weight",
        "arXiv 1710.03740; terrazzo/engine/plan/bucket_bytes.py",
    ),
    "memory.outer": Formula(
        "4 bytes x padded trainable elements / ranks of a replica for the weights that a round of steps begins with, "
        "and as many for momentum",
        "DiLoCo, arXiv 2311.08105; terrazzo/engine/plan/diloco.py",
    ),
    "memory.residuals": Formula(
        "4 bytes x padded elements of matrices / ranks that have split their gradients before these are sent in blocks;"
        " and where all ranks keep the sum, as many / ranks that add it",
        "1-bit Adam, arXiv 2102.02888; terrazzo/engine/plan/error_feedback.py",
    ),
    "memory.average": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `master`, 4 where a remainder is "
        "kept; in host memory where the optimizer's states are not on the device",
        "terrazzo/engine/model/ema.py; terrazzo/engine/plan/bucket_bytes.py",
    ),
    "memory.moments": Formula(
        "tensors per element x held trainable elements / ranks of `optim` x bytes of `moments`, and one step count for "
        "every run of parameters that share settings",
        "arXiv 1412.6980; terrazzo/engine/dry_run/bill.py",
    ),
}


class CountedState(NamedTuple):
    """What a term counts: a state, as `StateBytes` calls it, and that of a `Plan` in whose place it is."""

    name: str
    place: str


STATE_OF = {
    "weights": CountedState("weight", "weight"),
    "gradients": CountedState("grad", "grad"),
    "master": CountedState("master", "optim"),
    "moments": CountedState("moments", "optim"),
    "outer": CountedState("outer", "optim"),
    "residuals": CountedState("residuals", "grad"),
    "average": CountedState("average", "optim"),
}
"""The states by the names of their terms."""


# -- terms ---------------------------------------------------------------------------------------------------------


def state_terms(setup: Setup, pp_rank: int = 0, tier: str | None = None, updated: bool = False) -> tuple[Term, ...]:
    """Weights, gradients, master weights and moments of rank `pp_rank` along pp, in bytes.

    Gradients of a bare number of parameters are those of the ZeRO paper: kept at the plan's `grad` place.

    Args:
        tier: count only what lies there; None: wherever it lies.
        updated: count only what changes in a step.
    """
    if setup.model.bare:
        return _bare_terms(setup, tier)
    values, rows = dict.fromkeys(STATE_OF, 0.0), placed_units(setup, pp_rank)
    if setup.diloco is None:
        del values["outer"]
    if not setup.ema:
        del values["average"]
    if not setup.precision.error_feedback:
        del values["residuals"]
    for unit, count, placement in rows:
        for bucket in buckets(unit, placement):
            for name in values if bucket.trainable or not updated else ():
                state = bucket.resting.get(STATE_OF[name].name)
                if state is not None and tier in (None, state.tier):
                    values[name] += count * state.nbytes
    elements, placement = float(sum(unit.numel * count for unit, count, _ in rows)), placement_of(setup, ON_DEVICE)
    return tuple(_state_term(name, value, elements, placement) for name, value in values.items())


def _bare_terms(setup: Setup, tier: str | None) -> tuple[Term, ...]:
    numel, precision = setup.model.numel / (setup.mesh.tp * setup.mesh.pp), setup.precision
    placement = placement_of(setup, ON_DEVICE)
    own, spec = numel / placement.ranks(placement.plan.optim.axes), setup.optimizer
    moment = spec.bytes_each(precision)
    kept = (precision.weight != precision.master) * precision.master.itemsize + precision.remainder_bytes
    weight, grad, optim = (1.0 if tier is None else place.shares.get(tier, 0.0) for place in setup.plan.resting_places)
    values = {
        "weights": weight * numel / placement.ranks(placement.plan.weight.axes) * precision.weight.itemsize,
        "gradients": grad * numel / placement.ranks(placement.plan.grad.axes) * precision.accumulate.itemsize,
        "master": optim * own * kept,
        "moments": optim * own * moment * spec.moments,
    }
    if setup.ema:
        elsewhere = setup.plan.optim.tier != "device"
        values["average"] = own * precision.exact_master.itemsize * (tier in (None, "cpu" if elsewhere else "device"))
    return tuple(_state_term(name, value, numel, placement) for name, value in values.items())


def _state_term(name: str, value: float, elements: float, placement: Placement) -> Term:
    inputs = {
        "elements": elements,
        "tp": float(placement.tp),
        "ranks of weight": float(placement.ranks(placement.plan.weight.axes)),
        "ranks of optim": float(placement.ranks(placement.plan.optim.axes)),
        "bytes per element": value / elements if elements else 0.0,
    }
    return Term(name, value, value, f"memory.{name}", inputs)
