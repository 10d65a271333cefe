"""What each rank keeps of a model: weights, gradients, master weights and moments, by the places of a `Plan`.

The arithmetic is that of the engine's flat buckets (`terrazzo.engine.layout`, `bucket`, `bill`), without tensors or
process groups: tensors padded to `ALIGN` elements, a unit padded to `ALIGN` elements per data rank, and a state split
over the ranks of its place's axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from terrazzo.engine.layout import ALIGN, round_up
from terrazzo.engine.links.collectives import NEAR_BLOCK_BYTES
from terrazzo.engine.links.columns import MANY_FAR, ROUNDS
from terrazzo.engine.offload.drive import padded_bytes
from terrazzo.planner.formulas import FORMULAS, Formula, Term
from terrazzo.planner.memory.placement import Placement, placed_units, placement_of
from terrazzo.planner.model.shapes import TensorShape, UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "Phase",
    "Space",
    "UnitStates",
    "spaces",
    "state_terms",
    "unit_states",
]

FORMULAS |= {
    "memory.weights": Formula(
        "sum over units of padded elements / ranks of `weight` x bytes of the resting weights; where they are split as "
        "the optimizer's and only a cast away, master weights serve as both",
        "arXiv 1910.02054, section 3; terrazzo/engine/bucket.py",
    ),
    "memory.gradients": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `accumulate`, from the end of "
        "backward to zero_grad",
        "arXiv 1910.02054, section 3; terrazzo/engine/paper/bill.py",
    ),
    "memory.master": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `master`, unless it is the weight",
        "arXiv 1710.03740; terrazzo/engine/bucket.py",
    ),
    "memory.moments": Formula(
        "tensors per element x held trainable elements / ranks of `optim` x bytes of `moments`, and one step count for "
        "every run of parameters that share settings",
        "arXiv 1412.6980; terrazzo/engine/paper/bill.py",
    ),
}

Phase = tuple[bool, int]


@dataclass(frozen=True)
class UnitStates:
    """Bytes of one unit on one rank, whatever tier they lie on.

    Attributes:
        weight, master, grad, moments: at rest; away from the device in whole pages.
        full: gathered weights beside those at rest; 0 where modules read the resting weights themselves.
        held: kept between forward and backward in place of the full weights; `keep` where those stay instead.
        pending: an unreduced gradient on its way to the wire, `pending_local` one that only adds up on this rank.
        partial: a micro-batch's reduced sum at the `grad` place, on the device.
        reduction: of a last micro-batch, for each collective in turn: whether the unreduced gradient is still held
            while it is in flight, and bytes held beside. `early_reduction`: of an earlier micro-batch.
        largest_grad: of a single parameter, as autograd makes it.
        optim_numel: trainable elements that this rank updates.
        finished: of `grad`, what stays on the device.
        apart: new weights that are gathered on the device on their way to where they rest, of one space at a time.
    """

    weight: int
    master: int
    grad: int
    finished: int
    moments: float
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


@lru_cache(maxsize=8192)
def unit_states(unit: UnitShape, placement: Placement) -> UnitStates:
    """The bytes of one such unit. The root's weights stay from forward to backward."""
    return _sum([_space_states(space, not unit.block) for space in spaces(unit, placement)])


@lru_cache(maxsize=8192)
def spaces(unit: UnitShape, placement: Placement) -> tuple[Space, ...]:
    """The flat index spaces of one such unit."""
    return tuple(Space(members, placement) for members in _buckets(unit.tensors, placement.ep > 1))


def _buckets(tensors: tuple[TensorShape, ...], experts_apart: bool) -> list[tuple[TensorShape, ...]]:
    """Tensors that share a flat space: trainable and frozen ones apart, and experts that ranks share out among them."""
    groups: dict[tuple[bool, bool], list[TensorShape]] = {}
    for tensor in tensors:
        groups.setdefault((not tensor.trainable, experts_apart and tensor.role == "expert"), []).append(tensor)
    return [tuple(groups[key]) for key in sorted(groups)]


@lru_cache(maxsize=8192)
def _space_states(space: Space, root: bool) -> UnitStates:
    tensors, placement = space.tensors, space.placement
    precision, trainable = placement.precision, space.trainable
    weight_axes, between = placement.weight, () if root else placement.between
    optim_axes = placement.optim if trainable else placement.weight
    own_master, stored = space.has_own_master, space.weight_dtype
    compute, accumulate = precision.compute.itemsize, precision.accumulate.itemsize
    on_device = placement.tiers.weight == "device"
    resident = not weight_axes and stored == precision.compute and on_device
    full = 0 if resident else space.numel(()) * compute
    fetched_again = between == weight_axes and not on_device
    keep = not resident and (root or (between == () and not fetched_again))
    optim_numel = space.numel(optim_axes) if trainable else 0
    grad_here = placement.tiers.grad == "device"
    return UnitStates(
        weight=space.resting(weight_axes, stored.itemsize, placement.tiers.weight),
        master=space.resting(optim_axes, precision.master.itemsize, placement.tiers.optim) if own_master else 0,
        grad=space.resting(optim_axes, accumulate, placement.tiers.grad) if trainable else 0,
        finished=optim_numel * accumulate * grad_here,
        moments=_moment_bytes(space) if trainable else 0,
        full=full,
        held=0 if resident or keep or between == weight_axes else space.numel(between) * compute,
        keep=keep,
        regathered=not resident and not keep,
        pending=space.numel(()) * precision.reduce.itemsize if trainable else 0,
        pending_local=space.numel(()) * accumulate if trainable else 0,
        partial=space.numel(placement.grad) * accumulate * grad_here if trainable else 0,
        reduction=_reduction(space, placement, last=True) if trainable else (),
        early_reduction=_reduction(space, placement, last=False) if trainable else (),
        largest_grad=max(map(space.share, tensors)) * compute if trainable else 0,
        optim_numel=optim_numel,
        trainable=trainable,
        apart=space.numel(weight_axes) * stored.itemsize * _gathers_apart(space),
    )


def _gathers_apart(space: Space) -> bool:
    """Whether collectives cannot write where the weights rest; see `Bucket.gathers_apart`."""
    placement, tier = space.placement, space.placement.tiers.weight
    reached = tier == "device" or (tier == "cpu" and placement.host > 0)
    return space.trainable and not reached and placement.weight != placement.optim


class Space:
    """A flat index space of one unit, and how many of its elements a rank has under each place.

    Of its trainable or frozen tensors, or, under expert parallelism, of its experts, which fewer data ranks share.
    """

    def __init__(self, tensors: tuple[TensorShape, ...], placement: Placement) -> None:
        self.tensors, self.placement = tensors, placement
        self.ep = placement.ep if tensors[0].role == "expert" else 1
        self.trainable = tensors[0].trainable
        self.padded = placement.padded
        pad = ALIGN if placement.padded else 1
        self.end = sum(round_up(self.share(tensor), pad) for tensor in tensors)
        self.whole = round_up(self.end, ALIGN * self._ranks(placement.shards)) if placement.padded else self.end

    @property
    def has_own_master(self) -> bool:
        """As `Bucket` decides it."""
        precision, tiers = self.placement.precision, self.placement.tiers
        same_axes = self.placement.weight == self.placement.optim
        if not self.trainable or tiers.weight != tiers.optim:
            return self.trainable
        if precision.weight == precision.master:
            return not same_axes and tiers.weight == "nvme"
        cast_away = same_axes and self.placement.weight != () and precision.weight == precision.compute
        return not (self.padded and tiers.weight == "device" and cast_away)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weights at rest."""
        precision = self.placement.precision
        return precision.weight if self.has_own_master or not self.trainable else precision.master

    @property
    def moment_itemsize(self) -> float:
        """Bytes of one element of a moment."""
        chosen = self.placement.optimizer.moment_bytes
        return self.placement.precision.moments.itemsize if chosen is None else chosen

    def resting(self, axes: tuple[str, ...], itemsize: float, tier: str) -> int:
        """Bytes that a state takes on a rank; away from the device it has pages of its own."""
        count_bytes = math.ceil(self.numel(axes) * itemsize)
        return count_bytes if tier == "device" else padded_bytes(count_bytes)

    def share(self, tensor: TensorShape) -> int:
        """Elements of a tensor on a rank, before data ranks divide it."""
        parts = (self.placement.tp if tensor.split != "none" else 1) * self.ep
        return -(-tensor.numel // parts)

    def _ranks(self, ranks: int) -> int:
        return max(1, ranks // self.ep)

    def numel(self, axes: tuple[str, ...]) -> int:
        """Of one rank, when the space is split over `axes`."""
        ranks = self._ranks(self.placement.ranks(axes))
        return self.whole // ranks if self.padded else -(-self.whole // ranks)

    def runs(self, held: int) -> int:
        """Runs of parameters with the same settings in the first `held` elements: matrices, then norms and biases."""
        matrices = sum(round_up(self.share(t), ALIGN) for t in self.tensors if len(t.shape) >= 2)
        return (matrices > 0) + (self.end > matrices and held > matrices)


def _moment_bytes(space: Space) -> float:
    """On the device of the first rank, which no rank exceeds but by a step count: padding has no moments there."""
    placement, recipe, item = space.placement, space.placement.optimizer, space.moment_itemsize
    if placement.tiers.optim != "device":
        return recipe.moments * space.resting(placement.optim, item, placement.tiers.optim)
    held = min(space.end, space.numel(placement.optim))
    counts = space.runs(held) * recipe.fixed_bytes if space.padded else 0
    return held * item * recipe.moments + counts


def _reduction(space: Space, placement: Placement, last: bool) -> tuple[Phase, ...]:
    """What is held while each collective of a unit's reduction is in flight; see `Bucket.reduce`."""
    first = placement.grad or (placement.optim if last else ())
    phases = [(True, received) for received in _scatter(space, placement, (), first)]
    if not last:
        return tuple(phases)
    replicas = tuple(axis for axis, _ in placement.sizes if axis not in placement.optim)
    moves = first != placement.optim or bool(replicas)
    base = space.numel(first) * placement.precision.accumulate.itemsize if first and moves else 0
    phases += [(not first, base + received) for received in _scatter(space, placement, first, placement.optim)]
    for axis in replicas:
        received = _received(placement, axis, space.numel(placement.optim) * placement.precision.reduce.itemsize)
        phases += [(not first, base + received), *([(not first, base)] if placement.host else [])]
    return tuple(phases)


def _scatter(space: Space, placement: Placement, source: tuple[str, ...], target: tuple[str, ...]) -> list[int]:
    received = []
    for axis in target[len(source) :]:
        received.append(_received(placement, axis, space.numel(source) * placement.precision.reduce.itemsize))
        source = (*source, axis)
    return received


def _received(placement: Placement, axis: str, full_bytes: int) -> int:
    """What arrives from the other ranks of an axis to be summed; NCCL sums as it receives.

    On a CPU, ranks of one host are read block by block, and many on other hosts in rounds; see `GlooCollectives`.
    """
    if not placement.host:
        return 0
    size, inner = dict(placement.sizes)[axis], 1
    for name, ranks in placement.sizes:
        if name == axis:
            break
        inner *= ranks
    near = max(1, min(size, placement.host // inner))
    chunk, together = full_bytes // size, 0
    if size - near > MANY_FAR:
        near = near if size % near == 0 else 1
        together = min(ROUNDS, size // near - 1) * near if near > 1 else 0
    return (near - 1) * min(chunk, NEAR_BLOCK_BYTES) + (size - near + together) * chunk


def _sum(buckets: list[UnitStates]) -> UnitStates:
    if len(buckets) == 1:
        return buckets[0]
    return UnitStates(
        weight=sum(b.weight for b in buckets),
        master=sum(b.master for b in buckets),
        grad=sum(b.grad for b in buckets),
        finished=sum(b.finished for b in buckets),
        moments=sum(b.moments for b in buckets),
        full=sum(b.full for b in buckets),
        held=sum(b.held for b in buckets),
        keep=any(b.keep for b in buckets),
        regathered=any(b.regathered for b in buckets),
        pending=sum(b.pending for b in buckets),
        pending_local=sum(b.pending_local for b in buckets),
        partial=sum(b.partial for b in buckets),
        reduction=_together([b.reduction for b in buckets]),
        early_reduction=_together([b.early_reduction for b in buckets]),
        largest_grad=max(b.largest_grad for b in buckets),
        optim_numel=sum(b.optim_numel for b in buckets),
        trainable=any(b.trainable for b in buckets),
        apart=max(b.apart for b in buckets),
    )


def _together(chains: list[tuple[Phase, ...]]) -> tuple[Phase, ...]:
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
    if not setup.model.aligned:
        return _bare_terms(setup, tier)
    values = dict.fromkeys(("weights", "gradients", "master", "moments"), 0.0)
    for unit, count, placement in placed_units(setup, stage):
        for space in spaces(unit, placement):
            if space.trainable or not updated:
                states, tiers = _space_states(space, not unit.block), placement.tiers
                values["weights"] += count * states.weight * (tier in (None, tiers.weight))
                values["gradients"] += count * states.grad * (tier in (None, tiers.grad))
                values["master"] += count * states.master * (tier in (None, tiers.optim))
                values["moments"] += count * states.moments * (tier in (None, tiers.optim))
    elements = float(sum(unit.numel * count for unit, count, _ in placed_units(setup, stage)))
    return tuple(_term(name, value, elements, placement_of(setup)) for name, value in values.items())


def _bare_terms(setup: Setup, tier: str | None) -> tuple[Term, ...]:
    numel, precision = setup.model.numel / (setup.mesh.tp * setup.mesh.pp), setup.precision
    placement = placement_of(setup)
    own, recipe = numel / placement.ranks(placement.optim), setup.optimizer
    moment = precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
    same = precision.weight == precision.master
    weight, grad, optim = (
        1.0 if tier is None else place.shares.get(tier, 0.0)
        for place in (setup.plan.weight, setup.plan.grad, setup.plan.optim)
    )
    values = {
        "weights": weight * numel / placement.ranks(placement.weight) * precision.weight.itemsize,
        "gradients": grad * numel / placement.ranks(placement.grad) * precision.accumulate.itemsize,
        "master": 0.0 if same else optim * own * precision.master.itemsize,
        "moments": optim * own * moment * recipe.moments,
    }
    return tuple(_term(name, value, numel, placement) for name, value in values.items())


def _term(name: str, value: float, elements: float, placement: Placement) -> Term:
    inputs = {
        "elements": elements,
        "tp": float(placement.tp),
        "ranks of weight": float(placement.ranks(placement.weight)),
        "ranks of optim": float(placement.ranks(placement.optim)),
        "bytes per element": value / elements if elements else 0.0,
    }
    return Term(name, value, value, f"memory.{name}", inputs)
