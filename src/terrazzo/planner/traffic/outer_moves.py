"""What ranks exchange in an outer step of replicas that train by themselves: see the engine's `DiLoCo`."""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.planner.figures import Formula
from terrazzo.planner.layout.buckets import PlannedBucket, buckets
from terrazzo.planner.layout.placement import placed_units
from terrazzo.planner.machine.mesh import RankGroup, group_of, part_of_group
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.memory.outer_memory import outer_numel
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "outer_moves"]

FORMULAS = {
    "traffic.outer": Formula(
        "of n replicas, in every sync_every-th step: elements / ranks of a replica * 2 * 4 bytes * (n - 1) / n, or in "
        "blocks of 8 bits 260 / 256 bytes * (n - 1); and new weights within a replica once more",
        "DiLoCo, arXiv 2311.08105; terrazzo/engine/model/outer_step.py; equals the engine's count",
    ),
}


def outer_moves(setup: Setup, pp_rank: int) -> Iterator[UnitTransfer]:
    """The collectives of one outer step of a rank; none where there are no outer steps."""
    settings, numel = setup.diloco, outer_numel(setup, pp_rank)
    if settings is None or not numel:
        return
    group, replicas = group_of(setup.mesh, REPLICA_AXIS), setup.mesh.dp_replicate
    messages = settings.messages(numel)
    if replicas > 1:
        kind = "all_gather" if settings.traffic == "int8" else "all_reduce"
        sent = sum(settings.sent_bytes(message, replicas) for message in messages)
        yield _move(setup, kind, "outer gradients", sent, group, len(messages))
    for unit, count, placement in placed_units(setup, pp_rank):
        for bucket in buckets(unit, placement):
            if bucket.outer_states:
                for _ in range(count):
                    yield from _within(setup, bucket)


def _within(setup: Setup, bucket: PlannedBucket) -> Iterator[UnitTransfer]:
    """Gathers within a replica: from the parts of the outer step to master weights, and from these to weights."""
    for move in (*bucket.outer_gathers, *bucket.update_gathers):
        group = part_of_group(setup.mesh, move.over, bucket.ranks[move.over].size)
        yield _move(setup, move.kind, "outer weights", move.sent_bytes, group)


def _move(setup: Setup, kind: str, what: str, sent: float, group: RankGroup, messages: int = 1) -> UnitTransfer:
    return UnitTransfer(kind, what, "outer", When.UPDATE, sent, group, messages)
