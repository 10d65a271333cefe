"""What each rank keeps of a model: weights, gradients, master weights and moments, by the places of a `Plan`.

The arithmetic is that of the engine's flat buckets (`terrazzo.engine.layout`, `bucket`, `bill`), without tensors or
process groups: tensors padded to `ALIGN` elements, a unit padded to `ALIGN` elements per data rank, and a state split
over the ranks of its place's axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from terrazzo.engine import Place, Precision
from terrazzo.engine.layout import ALIGN, round_up
from terrazzo.engine.place import DATA_AXES
from terrazzo.planner.formulas import FORMULAS, Formula, Term
from terrazzo.planner.memory.stages import in_flight, stage_units
from terrazzo.planner.model.shapes import TensorShape, UnitShape
from terrazzo.planner.setup.setup import Mesh, OptimizerRecipe, Setup

__all__ = ["Phase", "Rules", "Space", "UnitStates", "in_flight", "rules_of", "spaces", "state_terms", "unit_states"]

FORMULAS |= {
    "memory.weights": Formula(
        "sum over units of padded elements / ranks of `weight` x bytes of the resting weights; where they are split as "
        "the optimizer's and only a cast away, master weights serve as both",
        "arXiv 1910.02054, section 3; terrazzo/engine/bucket.py",
    ),
    "memory.gradients": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `accumulate`, from the end of "
        "backward to zero_grad",
        "arXiv 1910.02054, section 3; terrazzo/engine/bill.py",
    ),
    "memory.master": Formula(
        "sum over units of padded trainable elements / ranks of `optim` x bytes of `master`, unless it is the weight",
        "arXiv 1710.03740; terrazzo/engine/bucket.py",
    ),
    "memory.moments": Formula(
        "tensors per element x held trainable elements / ranks of `optim` x bytes of `moments`, and one step count for "
        "every run of parameters that share settings",
        "arXiv 1412.6980; terrazzo/engine/bill.py",
    ),
}

_SYMBOLS = {"S": ("dp_shard",), "R": ("dp_replicate",), "D": DATA_AXES}


@dataclass(frozen=True)
class Rules:
    """What decides the bytes of every unit under one setup; hashable, so that units are computed once.

    Attributes:
        weight, between, grad, optim: the live axes of each place, outermost cut first.
        sizes: (axis, ranks) of the live data axes.
        shards: ranks over which a unit must divide evenly.
        tiers: of weight, grad and optim.
        padded: as the engine pads; a bare number of parameters is not, and its weights and master stay apart.
        host: ranks of one CPU host, which receive gradients in memory beside the sum; 0 on CUDA.
    """

    weight: tuple[str, ...]
    between: tuple[str, ...]
    grad: tuple[str, ...]
    optim: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    shards: int
    tiers: tuple[str, str, str]
    precision: Precision
    optimizer: OptimizerRecipe
    tp: int
    ep: int
    padded: bool
    host: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: rules are looked up for every unit."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def ranks(self, axes: Iterable[str]) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in axes)


def rules_of(setup: Setup) -> Rules:
    """The rules of a setup, its plan's places resolved to the data axes that have more than one rank."""
    plan, mesh = setup.plan, setup.mesh
    return _rules(
        (plan.weight, plan.between, plan.grad, plan.optim),
        mesh,
        setup.precision,
        setup.optimizer,
        setup.model.aligned,
        setup.cluster.device.per_node if setup.cluster.device.kind == "cpu" else 0,
    )


@lru_cache(maxsize=4096)
def _rules(  # structure: what a setup's rules follow from, as a cache key
    places: tuple[Place, ...], mesh: Mesh, precision: Precision, optimizer: OptimizerRecipe, padded: bool, host: int
) -> Rules:
    sizes = mesh.sizes()
    weight, between, grad, optim = (_live(place, sizes) for place in places)
    return Rules(
        weight=weight,
        between=between,
        grad=grad,
        optim=optim,
        sizes=tuple(sizes.items()),
        shards=math.prod(sizes.values()),
        tiers=(places[0].tier, places[2].tier, places[3].tier),
        precision=precision,
        optimizer=optimizer,
        tp=mesh.tp,
        ep=mesh.ep,
        padded=padded,
        host=host,
    )


def _live(place: Place, sizes: dict[str, int]) -> tuple[str, ...]:
    live: list[str] = []
    for axis in place.axes:
        live += [name for name in _SYMBOLS.get(axis, (axis,)) if name in sizes and name not in live]
    return tuple(live)


Phase = tuple[bool, int]


@dataclass(frozen=True)
class UnitStates:
    """Bytes of one unit on one rank, whatever tier they lie on.

    Attributes:
        weight, master, grad, moments: at rest.
        full: gathered weights beside those at rest; 0 where modules read the resting weights themselves.
        held: kept between forward and backward in place of the full weights; `keep` where those stay instead.
        pending: an unreduced gradient on its way to the wire, `pending_local` one that only adds up on this rank.
        partial: a micro-batch's reduced sum at the `grad` place.
        reduction: of a last micro-batch, for each collective in turn: whether the unreduced gradient is still held
            while it is in flight, and bytes held beside. `early_reduction`: of an earlier micro-batch.
        largest_grad: of a single parameter, as autograd makes it.
        optim_numel: trainable elements that this rank updates.
    """

    weight: int
    master: int
    grad: int
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


@lru_cache(maxsize=8192)
def unit_states(unit: UnitShape, rules: Rules) -> UnitStates:
    """The bytes of one such unit. The root's weights stay from forward to backward."""
    return _sum([_bucket(space, not unit.block) for space in spaces(unit, rules)])


@lru_cache(maxsize=8192)
def spaces(unit: UnitShape, rules: Rules) -> tuple[Space, ...]:
    """The flat index spaces of one such unit."""
    return tuple(Space(members, rules) for members in _buckets(unit.tensors, rules.ep > 1))


def _buckets(tensors: tuple[TensorShape, ...], experts_apart: bool) -> list[tuple[TensorShape, ...]]:
    """Tensors that share a flat space: trainable and frozen ones apart, and experts that ranks share out among them."""
    groups: dict[tuple[bool, bool], list[TensorShape]] = {}
    for tensor in tensors:
        groups.setdefault((not tensor.trainable, experts_apart and tensor.role == "expert"), []).append(tensor)
    return [tuple(groups[key]) for key in sorted(groups)]


def _bucket(space: Space, root: bool) -> UnitStates:
    tensors, rules = space.tensors, space.rules
    precision, trainable = rules.precision, space.trainable
    weight_axes, between = rules.weight, () if root else rules.between
    optim_axes = rules.optim if trainable else rules.weight
    own_master = trainable and not _weight_serves_as_master(rules, weight_axes, optim_axes)
    stored = precision.weight if own_master or not trainable else precision.master
    compute, accumulate = precision.compute.itemsize, precision.accumulate.itemsize
    resident = not weight_axes and stored == precision.compute and rules.tiers[0] == "device"
    full = 0 if resident else space.numel(()) * compute
    keep = not resident and between == () and (root or rules.tiers[0] == "device")
    optim_numel = space.numel(optim_axes) if trainable else 0
    return UnitStates(
        weight=space.numel(weight_axes) * stored.itemsize,
        master=optim_numel * precision.master.itemsize if own_master else 0,
        grad=optim_numel * accumulate,
        moments=_moment_bytes(space, rules) if trainable else 0,
        full=full,
        held=0 if resident or keep or between == weight_axes else space.numel(between) * compute,
        keep=keep,
        regathered=not resident and not keep,
        pending=space.numel(()) * precision.reduce.itemsize if trainable else 0,
        pending_local=space.numel(()) * accumulate if trainable else 0,
        partial=space.numel(rules.grad) * accumulate if trainable else 0,
        reduction=_reduction(space, rules, last=True) if trainable else (),
        early_reduction=_reduction(space, rules, last=False) if trainable else (),
        largest_grad=max(map(space.share, tensors)) * compute if trainable else 0,
        optim_numel=optim_numel,
        trainable=trainable,
    )


def _weight_serves_as_master(rules: Rules, weight_axes: tuple[str, ...], optim_axes: tuple[str, ...]) -> bool:
    """As `Bucket` decides it; on other tiers each state has memory of its own."""
    precision = rules.precision
    if rules.tiers[0] != rules.tiers[2]:
        return False
    if precision.weight == precision.master:
        return True
    return rules.padded and weight_axes == optim_axes != () and precision.weight == precision.compute


class Space:
    """A flat index space of one unit, and how many of its elements a rank has under each place.

    Of its trainable or frozen tensors, or, under expert parallelism, of its experts, which fewer data ranks share.
    """

    def __init__(self, tensors: tuple[TensorShape, ...], rules: Rules) -> None:
        self.tensors, self.rules = tensors, rules
        self.ep = rules.ep if tensors[0].role == "expert" else 1
        self.trainable = tensors[0].trainable
        self.padded = rules.padded
        pad = ALIGN if rules.padded else 1
        self.end = sum(round_up(self.share(tensor), pad) for tensor in tensors)
        self.whole = round_up(self.end, ALIGN * self._ranks(rules.shards)) if rules.padded else self.end

    def share(self, tensor: TensorShape) -> int:
        """Elements of a tensor on a rank, before data ranks divide it."""
        parts = (self.rules.tp if tensor.split != "none" else 1) * self.ep
        return -(-tensor.numel // parts)

    def _ranks(self, ranks: int) -> int:
        return max(1, ranks // self.ep)

    def numel(self, axes: tuple[str, ...]) -> int:
        """Of one rank, when the space is split over `axes`."""
        ranks = self._ranks(self.rules.ranks(axes))
        return self.whole // ranks if self.padded else -(-self.whole // ranks)

    def runs(self, held: int) -> int:
        """Runs of parameters with the same settings in the first `held` elements: matrices, then norms and biases."""
        matrices = sum(round_up(self.share(t), ALIGN) for t in self.tensors if len(t.shape) >= 2)
        return (matrices > 0) + (self.end > matrices and held > matrices)


def _moment_bytes(space: Space, rules: Rules) -> float:
    """Of the first rank, which no rank exceeds but by a step count: padding at the end of a unit has no moments."""
    recipe = rules.optimizer
    item = rules.precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
    held = min(space.end, space.numel(rules.optim))
    counts = space.runs(held) * recipe.fixed_bytes if space.padded else 0
    return held * item * recipe.moments + counts


def _reduction(space: Space, rules: Rules, last: bool) -> tuple[Phase, ...]:
    """What is held while each collective of a unit's reduction is in flight; see `Bucket.reduce`."""
    first = rules.grad or (rules.optim if last else ())
    phases = [(True, received) for received in _scatter(space, rules, (), first)]
    if not last:
        return tuple(phases)
    replicas = tuple(axis for axis, _ in rules.sizes if axis not in rules.optim)
    moves = first != rules.optim or bool(replicas)
    base = space.numel(first) * rules.precision.accumulate.itemsize if first and moves else 0
    phases += [(not first, base + received) for received in _scatter(space, rules, first, rules.optim)]
    for axis in replicas:
        received = _received(rules, axis, space.numel(rules.optim) * rules.precision.reduce.itemsize)
        phases += [(not first, base + received), *([(not first, base)] if rules.host else [])]
    return tuple(phases)


def _scatter(space: Space, rules: Rules, source: tuple[str, ...], target: tuple[str, ...]) -> list[int]:
    received = []
    for axis in target[len(source) :]:
        received.append(_received(rules, axis, space.numel(source) * rules.precision.reduce.itemsize))
        source = (*source, axis)
    return received


RECEIVE_BLOCK_BYTES = 1 << 20
"""Read at a time from a rank of the same CPU host; see `GlooCollectives`."""


def _received(rules: Rules, axis: str, full_bytes: int) -> int:
    """What arrives from the other ranks of an axis to be summed; NCCL sums as it receives."""
    if not rules.host:
        return 0
    size, inner = dict(rules.sizes)[axis], 1
    for name, ranks in rules.sizes:
        if name == axis:
            break
        inner *= ranks
    near = max(1, min(size, rules.host // inner))
    chunk = full_bytes // size
    return (near - 1) * min(chunk, RECEIVE_BLOCK_BYTES) + (size - near) * chunk


def _sum(buckets: list[UnitStates]) -> UnitStates:
    if len(buckets) == 1:
        return buckets[0]
    return UnitStates(
        weight=sum(b.weight for b in buckets),
        master=sum(b.master for b in buckets),
        grad=sum(b.grad for b in buckets),
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
    )


def _together(chains: list[tuple[Phase, ...]]) -> tuple[Phase, ...]:
    """Phases of buckets that are reduced one after the other, as if at once: never less than what is held."""
    longest = max(map(len, chains), default=0)
    steps = [[chain[index] for chain in chains if index < len(chain)] for index in range(longest)]
    return tuple((any(held for held, _ in step), sum(extra for _, extra in step)) for step in steps)


# -- terms ---------------------------------------------------------------------------------------------------------


def state_terms(setup: Setup, stage: int = 0) -> tuple[Term, ...]:
    """Weights, gradients, master weights and moments of a rank of `stage`, in bytes on whatever tier they lie.

    Of a bare number of parameters the gradients are those of the ZeRO paper: kept at the plan's `grad` place.
    """
    rules = rules_of(setup)
    if not setup.model.aligned:
        return _bare_terms(setup, rules)
    states = [(unit_states(u, rules), count) for u, count in stage_units(setup, stage)]
    elements = float(sum(unit.numel * count for unit, count in stage_units(setup, stage)))
    values = {
        "weights": sum(s.weight * count for s, count in states),
        "gradients": sum(s.grad * count for s, count in states),
        "master": sum(s.master * count for s, count in states),
        "moments": sum(s.moments * count for s, count in states),
    }
    return tuple(_term(name, value, elements, rules) for name, value in values.items())


def _bare_terms(setup: Setup, rules: Rules) -> tuple[Term, ...]:
    numel, precision = setup.model.numel / (setup.mesh.tp * setup.mesh.pp), setup.precision
    own, recipe = numel / rules.ranks(rules.optim), setup.optimizer
    moment = precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
    same = precision.weight == precision.master
    values = {
        "weights": numel / rules.ranks(rules.weight) * precision.weight.itemsize,
        "gradients": numel / rules.ranks(rules.grad) * precision.accumulate.itemsize,
        "master": 0.0 if same else own * precision.master.itemsize,
        "moments": own * moment * recipe.moments,
    }
    return tuple(_term(name, value, numel, rules) for name, value in values.items())


def _term(name: str, value: float, elements: float, rules: Rules) -> Term:
    inputs = {
        "elements": elements,
        "tp": float(rules.tp),
        "ranks of weight": float(rules.ranks(rules.weight)),
        "ranks of optim": float(rules.ranks(rules.optim)),
        "bytes per element": value / elements if elements else 0.0,
    }
    return Term(name, value, value, f"memory.{name}", inputs)
