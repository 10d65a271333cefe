"""States that are not on the device: what stays there for them, and what host memory and disks hold."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.planner.formulas import FORMULAS, Formula, Term
from terrazzo.planner.memory.stages import stage_units
from terrazzo.planner.memory.states import UnitStates, rules_of, state_terms, unit_states
from terrazzo.planner.setup.setup import Setup

__all__ = ["disk_writes", "host_writes", "on_device", "staging_bytes", "tier_terms"]

PINNED_OVERHEAD, PINNED_OVERHEAD_UPPER = 1.2, 1.5
"""Pinned host memory for a byte of state: torch's pinned allocator rounds every block up to a power of two (pytorch
aten/src/ATen/core/CachingHostAllocator.h), which a third of the way between two powers costs 1.2 to 1.5 times."""

DISK_BUFFERS = 3
"""Units' states in host memory while a disk is read, stepped on and written: one each."""

FORMULAS |= {
    "memory.staging": Formula(
        "two units' reduced gradients on their way to the host, resting weights of 1 + prefetch units on theirs back",
        "arXiv 2101.06840, section 4; arXiv 2104.07857, section 5",
    ),
    "memory.host": Formula(
        "bytes of the state on this rank x 1.2 (upper 1.5) for pinned allocations",
        "arXiv 2101.06840, section 3; pytorch CachingHostAllocator",
    ),
    "memory.host_buffers": Formula(
        "three units' states that lie on disk: one being read, one updated, one written",
        "arXiv 2104.07857, section 5.2",
    ),
    "memory.disk": Formula("bytes of the state on this rank", "arXiv 2104.07857, section 5"),
    "memory.disk_writes": Formula(
        "every state on disk is written once in each optimizer step: 12 bytes per parameter for Adam in fp32; 70B "
        "parameters write 0.84 TB, and eight drives of 7.68 TB rated for one drive write a day over five years last "
        "133,000 steps",
        "arXiv 2104.07857, section 5; drives' rated endurance",
    ),
}

_STATE_OF = {"weights": "weight", "gradients": "grad", "master": "optim", "moments": "optim"}


def on_device(setup: Setup, terms: Iterable[Term]) -> tuple[Term, ...]:
    """Those of the state terms whose tier is the device."""
    return tuple(term for term in terms if _tier(setup, term) == "device")


def staging_bytes(setup: Setup, stage: int) -> int:
    """Device memory through which states of other tiers come and go."""
    weight, grad, optim = rules_of(setup).tiers
    largest = 0
    for states in _states(setup, stage):
        staged = 0 if grad == optim == "device" else 2 * states.grad
        if weight != "device":
            staged += (1 + setup.prefetch) * states.weight
        largest = max(largest, staged)
    return largest


def tier_terms(setup: Setup, stage: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """What a rank of `stage` keeps in host memory and on disks."""
    if set(rules_of(setup).tiers) == {"device"}:
        return (), ()
    terms = [term for term in state_terms(setup, stage) if term.value]
    host = [_pinned(term) for term in terms if _tier(setup, term) == "cpu"]
    disk = [_moved(term, "memory.disk") for term in terms if _tier(setup, term) == "nvme"]
    if disk:
        host.append(_buffers(setup, stage))
    return tuple(host), tuple(disk)


def disk_writes(disk: Iterable[Term]) -> tuple[Term, ...]:
    """Bytes that a rank writes to disk in one optimizer step."""
    return tuple(_moved(term, "memory.disk_writes") for term in disk)


def host_writes(setup: Setup) -> float:
    """Bytes that the ranks of one host write to its disks in one optimizer step, on the fullest pipeline stage."""
    ranks = min(setup.cluster.count, setup.cluster.device.per_node)
    written = (disk_writes(tier_terms(setup, stage)[1]) for stage in {0, setup.mesh.pp - 1})
    return ranks * max(sum(term.value for term in terms) for terms in written)


def _tier(setup: Setup, term: Term) -> str:
    return setup.plan.places()[_STATE_OF[term.name]].tier


def _pinned(term: Term) -> Term:
    inputs = {"bytes of the state": term.value, "overhead": PINNED_OVERHEAD}
    value, upper = term.value * PINNED_OVERHEAD, term.value * PINNED_OVERHEAD_UPPER
    return Term(term.name, value, upper, "memory.host", inputs)


def _moved(term: Term, formula: str) -> Term:
    return Term(term.name, term.value, term.value, formula, {"bytes of the state": term.value})


def _buffers(setup: Setup, stage: int) -> Term:
    weight, _, optim = rules_of(setup).tiers
    unit = 0.0
    for states in _states(setup, stage):
        on_disk = states.master + states.moments if optim == "nvme" else 0.0
        unit = max(unit, on_disk + (states.weight if weight == "nvme" else 0))
    value = DISK_BUFFERS * unit
    inputs = {"bytes of the largest unit": unit, "buffers": float(DISK_BUFFERS)}
    return Term("disk buffers", value, value * PINNED_OVERHEAD_UPPER, "memory.host_buffers", inputs)


def _states(setup: Setup, stage: int) -> list[UnitStates]:
    rules = rules_of(setup)
    return [unit_states(unit, rules) for unit, _ in stage_units(setup, stage)]
