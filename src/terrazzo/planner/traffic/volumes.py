"""What one rank sends in one optimizer step, by collective and by link.

Data-parallel traffic, and what comes and goes between the device, the host and its disks, is what the engine's own
description of each bucket says. The other axes are in `exchanges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from terrazzo.engine.plan.moves import MoveBytes
from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.planner.figures import Formula, Sent, TrafficFigures
from terrazzo.planner.layout.buckets import PlannedBucket, buckets, trained_unit
from terrazzo.planner.layout.placement import Placement, placed_units, stand_ins
from terrazzo.planner.machine.mesh import part_of_group
from terrazzo.planner.machine.network import Network
from terrazzo.planner.machine.transfers import Link, UnitTransfer, When
from terrazzo.planner.memory.matrices import matrix_updates
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.copies import copies
from terrazzo.planner.traffic.exchanges import model_parallel_moves, pipeline_moves, shared_gradients
from terrazzo.planner.traffic.outer_moves import outer_moves

__all__ = [
    "FORMULAS",
    "expected_exchanges",
    "expected_rows_bytes",
    "matrix_moves",
    "repetitions",
    "traffic_of",
    "unit_copies",
    "unit_moves",
]

FORMULAS = {
    "traffic.all_gather": Formula(
        "sum over units, micro-batches and axes of n ranks: elements * bytes_per_element * (n - 1) / n",
        "ring all-gather; ZeRO, arXiv 1910.02054 section 7; equals the engine's count",
    ),
    "traffic.reduce_scatter": Formula(
        "sum over units, reductions and axes of n ranks: elements * bytes_per_element * (n - 1) / n",
        "ring reduce-scatter; ZeRO, arXiv 1910.02054 section 7; equals the engine's count",
    ),
    "traffic.all_reduce": Formula(
        "sum over units and axes of n ranks: 2 * elements * bytes_per_element * (n - 1) / n; once, of sums in blocks",
        "ring all-reduce, or what follows the reduce-scatter of blocks; equals the engine's count",
    ),
    "traffic.all_to_all": Formula(
        "of matrices that are updated whole, on the first rank: 2 bytes for each element of its share that another "
        "rank owns, and for each element of others' shares of what it owns itself",
        "terrazzo/engine/optim/matrices/matrix_owners.py; equals the engine's count",
    ),
    "traffic.send": Formula(
        "elements * bytes_per_element of unreduced gradients, once in a step, of a tied matrix that two stages have",
        "terrazzo/engine/buckets/gradients/gradient.py; equals the engine's count",
    ),
    "traffic.offload": Formula(
        "elements of this rank's shard * bytes_per_element, for each copy between device, host and disk",
        "ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; terrazzo/engine/offload/updater.py",
    ),
}


def traffic_of(setup: Setup) -> TrafficFigures:
    """Traffic of the rank that sends most, of all along pp."""
    middle = 1  # sends onward and back, where the first and the last send one way: none stands for it
    per_pp_rank = [_collect(setup, pp_rank) for pp_rank in sorted(set(stand_ins(setup, middle)))]
    most = max(per_pp_rank, key=lambda sums: sum(each.sent_bytes for each in sums.values()))
    terms, by_link = [], dict.fromkeys(Link, 0.0)
    for name, (move, links) in most.items():
        value, inputs = sum(links.values()), {f"{link}_bytes": sent for link, sent in links.items()}
        terms.append(Sent(name, value, value, move.formula, inputs, links=links, purpose=move.purpose))
        for link, sent in links.items():
            by_link[link] += sent
    return TrafficFigures(tuple(terms), {link: sent for link, sent in by_link.items() if sent})


def expected_exchanges(setup: Setup, pp_rank: int = 0) -> dict[str, int]:
    """Bytes of activations that rank `pp_rank` along pp sends along `tp`, `cp` and `pp` in a step.

    The keys are those of the engine's `Traffic.by_name`.
    """
    axes, sent = {"tensor": "tp ", "context": "cp ", "pipeline": ""}, dict[str, int]()
    for each in _collect(setup, pp_rank).values():
        if (axis := axes.get(each.move.purpose)) is not None:
            name = f"{axis}{each.move.kind}"
            sent[name] = sent.get(name, 0) + round(each.sent_bytes)
    return sent


def expected_rows_bytes(setup: Setup) -> int:
    """What a rank sends to experts of others and back in a step, if all experts are as busy."""
    return round(sum(term.value for term in traffic_of(setup).collectives if term.purpose == "expert"))


class _MoveSum(NamedTuple):
    """Moves of one name: one of them, and bytes of all by link."""

    move: UnitTransfer
    links: dict[Link, float]

    @property
    def sent_bytes(self) -> float:
        return sum(self.links.values())


def _collect(setup: Setup, pp_rank: int) -> dict[str, _MoveSum]:
    """What rank `pp_rank` along pp sends in a step, by name."""
    sums, network = dict[str, _MoveSum](), Network(setup.cluster.device)

    def add(move: UnitTransfer, times: float) -> None:
        links = sums.setdefault(f"{move.counts_as} {move.what}", _MoveSum(move, {})).links
        link = network.link(move.over)
        links[link] = links.get(link, 0) + move.sent_bytes * times

    for unit, count, placement in placed_units(setup, pp_rank):
        repeats = repetitions(setup, unit)
        for move in (*unit_moves(setup, unit, placement), *unit_copies(unit, placement)):
            add(move, count * repeats[move.when])
        for move in model_parallel_moves(setup, unit):
            add(move, count * setup.micro_batches)
        if copied_bytes := trained_unit(unit, placement).copied:
            add(shared_gradients(setup, copied_bytes), count)
    for move in pipeline_moves(setup, pp_rank):
        add(move, setup.micro_batches)
    for move in matrix_moves(setup, pp_rank):
        add(move, 1)
    for outer in outer_moves(setup, pp_rank):
        add(outer.move, outer.per_step)
    return sums


def repetitions(setup: Setup, unit: UnitShape) -> dict[When, int]:
    """How often each kind of move of a unit happens in a step."""
    micro_batches, first = setup.micro_batches, 1 if setup.staged else setup.micro_batches
    passes = micro_batches if unit.forward_only else 2 * micro_batches
    return {
        When.FORWARD: first,  # in stages, what comes again has been put where it stays between forward and backward
        When.BACKWARD: passes - first,
        When.REDUCE: 0 if setup.sums_locally else micro_batches - 1,
        When.LAST: 1,
        When.UPDATE: 1,
    }


# -- data parallelism ------------------------------------------------------------------------------------------


def unit_moves(setup: Setup, unit: UnitShape, placement: Placement) -> tuple[UnitTransfer, ...]:
    """The data-parallel collectives of one unit, in the engine's order. The root unit is not gathered twice."""
    moves = []
    for bucket in buckets(unit, placement):
        messages = 1 if setup.coalesced else len(bucket.tensors)
        for when in When:
            for move in _collectives(bucket, when):
                group = part_of_group(setup.mesh, move.over, bucket.ranks[move.over].size)
                if group.size > 1 or move.kind != "all_reduce":
                    moves.append(UnitTransfer(move.kind, move.what, "data", when, move.sent_bytes, group, messages))
    return tuple(moves)


def _collectives(bucket: PlannedBucket, when: When) -> Sequence[MoveBytes]:
    """The collectives of one bucket at one moment of a step."""
    match when:
        case When.FORWARD:
            return bucket.weight_gathers
        case When.BACKWARD:
            return bucket.between_gathers
        case _ if not bucket.trainable:
            return []
        case When.UPDATE:
            return bucket.update_gathers
        case When.REDUCE | When.LAST:
            reduction = bucket.sums.last if when is When.LAST else bucket.sums.earlier
            return [*reduction.partial, *reduction.finish]


def matrix_moves(setup: Setup, pp_rank: int) -> tuple[UnitTransfer, ...]:
    """Exchanges with the owners of matrices that are updated whole, there and back, in a step."""
    moves = []
    for axis, size, sent_bytes, messages in matrix_updates(setup, pp_rank).exchanged:
        group = part_of_group(setup.mesh, axis, size)
        moves.append(UnitTransfer("all_to_all", "matrices", "data", When.UPDATE, sent_bytes, group, messages))
    return tuple(moves)


def unit_copies(unit: UnitShape, placement: Placement) -> tuple[UnitTransfer, ...]:
    """What comes and goes between the device, the host's memory and its disks for a unit.

    The root unit's weights are not fetched twice.
    """
    if placement.tiers == ON_DEVICE:
        return ()
    return tuple(
        UnitTransfer(move.kind, move.what, "offload", when, move.sent_bytes, Link(move.over))
        for bucket in buckets(unit, placement)
        for when in When
        for move in copies(bucket, when, each_is_reduced=bool(placement.plan.grad.axes))
        if move.sent_bytes
    )
