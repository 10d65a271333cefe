"""States that are not on the device: what stays there for them, and what host memory and disks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from terrazzo.engine.offload.needs import Need, host_bytes, host_sum_bytes, load_bytes, send_bytes, staging_bytes
from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.buckets import PlannedBucket, buckets
from terrazzo.planner.layout.placement import placed_units, stand_ins
from terrazzo.planner.layout.stages import in_flight, saving_blocks
from terrazzo.planner.memory.activations import block_activations
from terrazzo.planner.memory.states import STATE_OF, state_terms
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "disk_writes", "host_writes", "moved_activations", "on_device", "tier_terms"]

FORMULAS = {
    "memory.host": Formula(
        "bytes of the state on this rank, every state of every unit in whole pages of 4,096 bytes: they lie in one "
        "block of memory that is mapped, and pinned, once",
        "arXiv 2101.06840, section 3; terrazzo/engine/offload/needs.py, terrazzo/engine/offload/host_arena.py",
    ),
    "memory.host_buffers": Formula(
        "depth x one cell of weights that are read for computation, and max(4, depth) x one cell of all states that "
        "are updated on disk: some are being read, one is stepped on, some are written; a cell has block_mib / 4 Mi "
        "elements",
        "arXiv 2104.07857, section 5.2; terrazzo/engine/offload/store.py",
    ),
    "memory.host_sends": Formula(
        "2 x one cell of new weights that are cast in host memory before they cross to the device: one is cast while "
        "the other is copied; a cell has up to 8 Mi elements",
        "terrazzo/engine/offload/sending.py",
    ),
    "memory.host_sums": Formula(
        "sums of earlier micro-batches at the `grad` place, where gradients are not on the device",
        "terrazzo/engine/buckets/gradients/gradient.py",
    ),
    "memory.host_activations": Formula(
        "blocks x inputs that checkpointing keeps of one block per micro-batch x micro-batches in flight",
        "arXiv 2104.07857, section 5.1.2; terrazzo/engine/offload/activations/offloaded_activations.py",
    ),
    "memory.disk": Formula(
        "bytes of the state on this rank, every state of every unit in whole pages of 4,096 bytes",
        "arXiv 2104.07857, section 5; terrazzo/engine/offload/needs.py",
    ),
    "memory.disk_writes": Formula(
        "every state on disk that changes is written once in each optimizer step: 12 bytes per parameter for Adam in "
        "fp32; 70B parameters write 0.84 TB, and eight drives of 7.68 TB rated for one drive write a day over five "
        "years last 133,000 steps",
        "arXiv 2104.07857, section 5; drives' rated endurance",
    ),
}


def on_device(setup: Setup, pp_rank: int) -> tuple[Term, ...]:
    """The state terms of what is on the device; none for a state that is wholly elsewhere."""
    places = setup.plan.places()
    return tuple(
        term for term in state_terms(setup, pp_rank, "device") if "device" in places[STATE_OF[term.name].place].shares
    )


class TierTerms(NamedTuple):
    """What one rank keeps away from the device, by where it is."""

    host: tuple[Term, ...]
    disk: tuple[Term, ...]


def tier_terms(setup: Setup, pp_rank: int) -> TierTerms:
    """What rank `pp_rank` along pp keeps in host memory and on disks."""
    if not setup.plan.offloaded:
        return TierTerms(_activations(setup, pp_rank), ())
    host = [_moved(term, "memory.host") for term in state_terms(setup, pp_rank, "cpu") if term.value]
    disk = [_moved(term, "memory.disk") for term in state_terms(setup, pp_rank, "nvme") if term.value]
    host += [_sums(setup, pp_rank), _sends(setup, pp_rank), _buffers(setup, pp_rank), *_activations(setup, pp_rank)]
    return TierTerms(tuple(term for term in host if term.value), tuple(disk))


def disk_writes(setup: Setup, pp_rank: int) -> tuple[Term, ...]:
    """Bytes that rank `pp_rank` along pp writes to disk in one optimizer step."""
    terms = state_terms(setup, pp_rank, "nvme", updated=True)
    return tuple(_moved(term, "memory.disk_writes") for term in terms if term.value)


def host_writes(setup: Setup) -> float:
    """Bytes that the ranks of one host write to its disks in one optimizer step, where along pp they write most."""
    if not setup.plan.on_disk:
        return 0.0
    return setup.cluster.ranks_per_host * max(
        sum(term.value for term in disk_writes(setup, pp_rank)) for pp_rank in set(stand_ins(setup))
    )


def moved_activations(setup: Setup, pp_rank: int) -> float:
    """Bytes of one micro-batch that activation offload takes from the device, of the widest block of a rank."""
    blocks = saving_blocks(setup, pp_rank)
    return max((block_activations(setup, block).moved for block, _ in blocks), default=0.0)


def _activations(setup: Setup, pp_rank: int) -> tuple[Term, ...]:
    moved = moved_activations(setup, pp_rank)
    blocks = float(sum(count for _, count in saving_blocks(setup, pp_rank)))
    waiting = in_flight(setup, pp_rank)
    value = moved * blocks * waiting
    inputs = {"blocks": blocks, "inputs of one block": moved, "micro-batches in flight": waiting}
    return (Term("activations", value, value, "memory.host_activations", inputs),) if value else ()


def _moved(term: Term, formula: str) -> Term:
    return Term(term.name, term.value, term.value, formula, {"bytes of the state": term.value})


def _sums(setup: Setup, pp_rank: int) -> Term:
    """Sums of micro-batches that are not the last, which go no further than the host's memory."""
    value = 0.0
    if setup.micro_batches > 1 and not setup.sums_locally and not setup.model.bare:
        value += sum(count * host_sum_bytes(bucket) for bucket, count in _buckets(setup, pp_rank))
    return Term("sums", value, value, "memory.host_sums", {"micro-batches": float(setup.micro_batches)})


def _sends(setup: Setup, pp_rank: int) -> Term:
    """Host memory through which new weights go to the device."""
    send = max((send_bytes(bucket) for bucket, _ in _buckets(setup, pp_rank)), default=0)
    value = float(host_bytes(Need(send_bytes=send), setup.offload)) if not setup.model.bare else 0.0
    return Term("weights to the device", value, value, "memory.host_sends", {"cell of weights": float(send)})


def _buffers(setup: Setup, pp_rank: int) -> Term:
    """Host memory through which states on disk come and go."""
    cell, own_buckets = setup.offload.cell_numel, [bucket for bucket, _ in _buckets(setup, pp_rank)]
    load = max((load_bytes(bucket, cell) for bucket in own_buckets), default=0)
    staging = max((staging_bytes(bucket, bucket.apart_moment_bytes, cell) for bucket in own_buckets), default=0)
    value = (
        float(host_bytes(Need(nvme=(load, staging), load_bytes=load, staging_bytes=staging), setup.offload))
        if load or staging
        else 0.0
    )
    inputs = {"depth": float(setup.offload.depth), "cell of weights": float(load), "cell of states": float(staging)}
    return Term("disk buffers", value, value, "memory.host_buffers", inputs)


def _buckets(setup: Setup, pp_rank: int) -> Iterator[tuple[PlannedBucket, int]]:
    """Every bucket of a rank along pp, and how often it is there."""
    for unit, count, placement in placed_units(setup, pp_rank):
        for bucket in buckets(unit, placement):
            yield bucket, count
