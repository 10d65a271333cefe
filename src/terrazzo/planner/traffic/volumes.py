"""What one rank sends in one optimizer step, by collective and by link.

Data-parallel traffic, and what comes and goes between the device, the host and its disks, is what the engine's own
description of each bucket says. The other axes follow their papers.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.engine.place import ON_DEVICE
from terrazzo.engine.spec import When
from terrazzo.planner.figures import Sent, Traffic
from terrazzo.planner.formulas import FORMULAS, Formula
from terrazzo.planner.machine.network import Group, Network, Transfer, group_of
from terrazzo.planner.memory.buckets import buckets
from terrazzo.planner.memory.placement import Placement, placed_units, stand_ins
from terrazzo.planner.model.shapes import BlockShape, UnitShape
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.copies import copies

__all__ = [
    "model_parallel_moves",
    "pipeline_moves",
    "repetitions",
    "traffic_of",
    "unit_copies",
    "unit_moves",
]

FORMULAS |= {
    "traffic.all_gather": Formula(
        "sum over units, micro-batches and axes of n ranks: elements * bytes_per_element * (n - 1) / n",
        "ring all-gather; ZeRO, arXiv 1910.02054 section 7; equals the engine's count",
    ),
    "traffic.reduce_scatter": Formula(
        "sum over units, reductions and axes of n ranks: elements * bytes_per_element * (n - 1) / n",
        "ring reduce-scatter; ZeRO, arXiv 1910.02054 section 7; equals the engine's count",
    ),
    "traffic.all_reduce": Formula(
        "sum over units and axes of n ranks: 2 * elements * bytes_per_element * (n - 1) / n",
        "ring all-reduce; equals the engine's count",
    ),
    "traffic.tensor": Formula(
        "4 all-reduces, or pairs of all-gather and reduce-scatter, per block and micro-batch (6 with full activation "
        "checkpointing): each 2 * tokens * hidden * bytes_per_element * (tp - 1) / tp",
        "Megatron-LM, arXiv 1909.08053 section 3; sequence parallelism, arXiv 2205.05198 section 4.2",
    ),
    "traffic.context": Formula(
        "per block and micro-batch, keys and values (cp - 1) / cp once forward and twice backward",
        "ring attention, arXiv 2310.01889",
    ),
    "traffic.pipeline": Formula(
        "boundaries * micro_batches * tokens * hidden * bytes_per_element / tp, activations onward and gradients back",
        "Megatron-LM, arXiv 2104.04473 sections 2.2 and 4.1",
    ),
    "traffic.expert": Formula(
        "per block and micro-batch, tokens * active_experts * hidden * bytes_per_element * (ep - 1) / ep, for dispatch "
        "and combine, forward and backward",
        "GShard, arXiv 2006.16668",
    ),
    "traffic.offload": Formula(
        "elements of this rank's shard * bytes_per_element, for each copy between device, host and disk",
        "ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; terrazzo/engine/offload/update.py",
    ),
}


def traffic_of(setup: Setup) -> Traffic:
    """Traffic of the rank that sends most, of all pipeline stages."""
    per_stage = [_collect(setup, stage) for stage in sorted(set(stand_ins(setup)))]
    totals = max(per_stage, key=lambda found: sum(sum(links.values()) for _, links in found.values()))
    terms, by_link = [], dict.fromkeys(("scaleup", "internode", "pcie", "disk"), 0.0)
    for name, (move, links) in totals.items():
        value, inputs = sum(links.values()), {f"{link}_bytes": sent for link, sent in links.items()}
        terms.append(Sent(name, value, value, move.formula, inputs, links=links, purpose=move.purpose))
        for link, sent in links.items():
            by_link[link] += sent
    return Traffic(tuple(terms), {link: sent for link, sent in by_link.items() if sent})


Collected = dict[str, tuple[Transfer, dict[str, float]]]
"""By name: one of the transfers, and bytes of all of them by link."""


def _collect(setup: Setup, stage: int) -> Collected:
    found: Collected = {}

    def add(move: Transfer, times: float) -> None:
        links = found.setdefault(f"{move.kind} {move.what}", (move, {}))[1]
        links[move.link] = links.get(move.link, 0) + move.sent_bytes * times

    repeats = repetitions(setup)
    for unit, count, placement in placed_units(setup, stage):
        for move in (*unit_moves(setup, unit, placement), *unit_copies(unit, placement)):
            add(move, count * repeats[move.when])
        for move in model_parallel_moves(setup, unit):
            add(move, count * setup.micro_batches)
    for move in pipeline_moves(setup):
        add(move, setup.micro_batches)
    return found


def repetitions(setup: Setup) -> dict[str, int]:
    """How often each kind of move happens in a step."""
    micro_batches = setup.micro_batches
    return {
        "forward": micro_batches,
        "backward": micro_batches,
        "reduce": 0 if setup.sums_locally else micro_batches - 1,
        "last": 1,
        "update": 1,
    }


# -- data parallelism ------------------------------------------------------------------------------------------


def unit_moves(setup: Setup, unit: UnitShape, placement: Placement) -> tuple[Transfer, ...]:
    """The data-parallel collectives of one unit, in the engine's order. The root unit is not gathered twice."""
    network, found = Network(setup.cluster.device), []
    for bucket in buckets(unit, placement):
        messages = 1 if setup.coalesced else len(bucket.tensors)
        for when in When:
            for move in bucket.collectives(when):
                group = _group(setup, move.over, bucket.ranks[move.over].size)
                if group.size > 1 or move.kind != "all_reduce":
                    link = network.link(group)
                    found.append(Transfer(move.kind, move.what, "data", when, move.sent_bytes, group, link, messages))
    return tuple(found)


def _group(setup: Setup, axis: str, size: int) -> Group:
    """`size` ranks of an axis: of experts' tensors, what expert parallelism leaves of it."""
    whole = group_of(setup.mesh, axis)
    return Group(axis, size, whole.stride * (whole.size // size))


def unit_copies(unit: UnitShape, placement: Placement) -> tuple[Transfer, ...]:
    """What comes and goes between the device, the host's memory and its disks for one unit, by `when` as in `Transfer`.

    The root unit's weights are not fetched twice.
    """
    if placement.tiers == ON_DEVICE:
        return ()
    return tuple(
        Transfer(move.kind, move.what, "offload", when, move.sent_bytes, None, move.over)
        for bucket in buckets(unit, placement)
        for when in When
        for move in copies(bucket, when)
        if move.sent_bytes
    )


# -- the other axes --------------------------------------------------------------------------------------------


def model_parallel_moves(setup: Setup, unit: UnitShape) -> Iterator[Transfer]:
    """Tensor, context and expert parallelism in one unit and one micro-batch.

    Moves of forward and backward are told apart by `when`; what activation checkpointing repeats counts as backward.
    """
    block = unit.block
    if setup.mesh.tp > 1:
        yield from _tensor_moves(setup, block)
    if block is None:
        return
    if setup.mesh.cp > 1:
        yield from _context_moves(setup, block)
    if setup.mesh.ep > 1 and block.experts:
        yield from _expert_moves(setup, block)


def activation_bytes(setup: Setup) -> float:
    """Of the residual stream of one micro-batch on one rank, whole over tensor-parallel ranks: [tokens, hidden]."""
    return setup.tokens / setup.mesh.cp * setup.model.hidden * setup.precision.compute.itemsize


def _tensor_moves(setup: Setup, block: BlockShape | None) -> Iterator[Transfer]:
    """All-reduces, or as many pairs of all-gather and reduce-scatter.

    Two a block forward and two backward, two more where forward is repeated; one each way for embedding and head.
    """
    group = group_of(setup.mesh, "tp")
    once = 2 * activation_bytes(setup) * (group.size - 1) / group.size
    again = 2 / setup.every if setup.checkpointing == "full" and block else 0.0
    each = 2 if block else 1
    kind = "all_gather + reduce_scatter" if setup.sequence_parallel else "all_reduce"
    link = Network(setup.cluster.device).link(group)
    for when, count in (("forward", each), ("backward", each + again)):
        messages = round(2 * count) if setup.sequence_parallel else round(count)
        yield Transfer(kind, "tensor-parallel activations", "tensor", when, count * once, group, link, messages)


def _context_moves(setup: Setup, block: BlockShape) -> Iterator[Transfer]:
    group = group_of(setup.mesh, "cp")
    heads = max(1.0, block.kv_heads / setup.mesh.tp)
    channels = block.kv_latent or heads * (block.head_dim + block.value_dim)
    once = setup.tokens * channels * setup.precision.compute.itemsize * (group.size - 1) / group.size
    again = 1 / setup.every if setup.checkpointing == "full" else 0.0
    link = Network(setup.cluster.device).link(group)
    for when, count in (("forward", 1), ("backward", 2 + again)):
        yield Transfer("send", "keys and values", "context", when, count * once, group, link)


def _expert_moves(setup: Setup, block: BlockShape) -> Iterator[Transfer]:
    group = group_of(setup.mesh, "ep")
    once = activation_bytes(setup) * block.active_experts * (group.size - 1) / group.size
    again = 2 / setup.every if setup.checkpointing == "full" else 0.0
    link = Network(setup.cluster.device).link(group)
    for when, count in (("forward", 2), ("backward", 2 + again)):
        yield Transfer("all_to_all", "expert tokens", "expert", when, count * once, group, link, round(count))


def pipeline_moves(setup: Setup) -> Iterator[Transfer]:
    """What a middle stage sends of each micro-batch: activations onward, their gradients back."""
    stages = setup.mesh.pp
    if stages == 1:
        return
    group = group_of(setup.mesh, "pp")
    neighbours = Group("pp", 2, group.stride)
    once = activation_bytes(setup) / setup.mesh.tp * setup.virtual_stages
    link = Network(setup.cluster.device).link(neighbours)
    for when in ("forward", "backward") if stages > 2 or setup.virtual_stages > 1 else ("forward",):
        yield Transfer("send", "pipeline activations", "pipeline", when, once, neighbours, link)
