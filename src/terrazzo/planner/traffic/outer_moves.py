"""What ranks exchange in outer steps of replicas that train by themselves: see the engine's `DiLoCo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.planner.figures import Formula
from terrazzo.planner.layout.buckets import PlannedBucket
from terrazzo.planner.machine.mesh import RankGroup, group_of, part_of_group
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.memory.outer_memory import outer_fragments, outer_numel, outer_units
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "OuterMove", "outer_moves"]

FORMULAS = {
    "traffic.outer": Formula(
        "of n replicas, in every sync_every-th step: elements / ranks of a replica * 2 * 4 bytes * (n - 1) / n, or in "
        "blocks of 8 bits 260 / 256 bytes * (n - 1); and new weights within a replica once more. Of each "
        "fragment likewise, as often as it is exchanged within a round",
        "DiLoCo, arXiv 2311.08105; terrazzo/engine/replicas/rounds.py; equals the engine's count",
    ),
}


class OuterMove(NamedTuple):
    """A collective of outer steps.

    Attributes:
        per_step: how often it comes in a step, on average.
        beside: steps that are taken while it is under way.
    """

    move: UnitTransfer
    per_step: float
    beside: int = 0


def outer_moves(setup: Setup, pp_rank: int) -> Iterator[OuterMove]:
    """The collectives of a rank's outer steps, those of each fragment apart; none where there are no outer steps."""
    settings, units = setup.diloco, outer_units(setup, pp_rank)
    if settings is None or not units:
        return
    fragments, round_steps = outer_fragments(setup, pp_rank), settings.round_steps
    yield from _of_step(setup, units, 1 / round_steps)
    for number, count in Counter(settings.exchanged_in_round()).items():
        yield from _of_step(setup, fragments[number], count / round_steps, is_fragment=True)


def _of_step(
    setup: Setup, units: Sequence[Sequence[PlannedBucket]], per_step: float, *, is_fragment: bool = False
) -> Iterator[OuterMove]:
    settings, replicas = setup.diloco, setup.mesh.dp_replicate
    assert settings is not None, "outer steps have settings"
    messages = settings.messages(outer_numel(units), whole=is_fragment)
    if replicas > 1 and messages:
        kind = "all_gather" if settings.traffic == "int8" else "all_reduce"
        sent = sum(settings.sent_bytes(message, replicas) for message in messages)
        move = _move(setup, kind, "outer gradients", sent, group_of(setup.mesh, REPLICA_AXIS), len(messages))
        yield OuterMove(move, per_step, settings.delay if is_fragment else 0)
    for bucket in (bucket for unit in units for bucket in unit):
        for gather in (*bucket.outer_gathers, *bucket.update_gathers):  # to master weights, and from these to weights
            group = part_of_group(setup.mesh, gather.over, bucket.ranks[gather.over].size)
            yield OuterMove(_move(setup, gather.kind, "outer weights", gather.sent_bytes, group), per_step)


def _move(setup: Setup, kind: str, what: str, sent: float, group: RankGroup, messages: int = 1) -> UnitTransfer:
    return UnitTransfer(kind, what, "outer", When.UPDATE, sent, group, messages)
