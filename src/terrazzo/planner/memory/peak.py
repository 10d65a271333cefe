"""Peak memory of the fullest rank, term by term: states, a step at its fullest moment, and what lies around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from terrazzo.planner.figures import Formula, MemoryFigures, Term
from terrazzo.planner.layout.buckets import trained_unit
from terrazzo.planner.layout.placement import Placement, placed_units, stand_ins
from terrazzo.planner.layout.stages import blocks_of_chunks, in_flight, last_turns, saving_blocks, units_on
from terrazzo.planner.memory.activations import BlockActivations, block_activations
from terrazzo.planner.memory.logits import head_activations
from terrazzo.planner.memory.matrices import matrix_updates
from terrazzo.planner.memory.outer_memory import outer_held_bytes, under_way_bytes
from terrazzo.planner.memory.overheads import (
    device_bytes,
    process_term,
    reserved_bytes,
    upper_bytes,
    upper_share,
    workspace_bytes,
)
from terrazzo.planner.memory.step_settings import ACTIVATIONS, HELD_KINDS, LOGITS, Peak, StepSettings, StepUnit
from terrazzo.planner.memory.tiers import disk_writes, moved_activations, on_device, tier_terms
from terrazzo.planner.memory.unit_events import UNREDUCED, unit_events
from terrazzo.planner.memory.walk import peak_of
from terrazzo.planner.memory.walk_state import AT_LOSS
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "RankTerms", "fullest_memory", "memory_of", "rank_peak", "rank_terms"]

FORMULAS = {
    "memory.gathered": Formula(
        "full weights of the units that run or are gathered ahead (1 + prefetch), the root's from forward to backward, "
        "and what `between` keeps of the others",
        "arXiv 2304.11277, section 3; terrazzo/engine/schedule/gathered.py",
    ),
    "memory.unreduced": Formula(
        "gradients that autograd has made and no collective has taken yet: of the running unit and the root, of every "
        "unit while micro-batches only add up; and sums of earlier micro-batches at the `grad` place. Upper: 16-bit "
        "gradients beside fp32 sums, as Megatron-DeepSpeed and nanotron keep them",
        "terrazzo/engine/schedule/backward.py",
    ),
    "memory.staging": Formula(
        "inputs of two blocks that activation offload moves: on their way to the host, and waited for",
        "terrazzo/engine/offload/activations/offloaded_activations.py",
    ),
    "memory.messages": Formula(
        "tokens x hidden x bytes of an element, whole over tp: what a stage has made of each micro-batch in flight, "
        "gradients that it has sent back, until the step ends, and two messages that it has asked for",
        "terrazzo/parallel/pipeline/schedule_runner.py and messages.py",
    ),
    "memory.buffers": Formula(
        "bytes of the buffers of a rank's stages, and of those in no stage, of which a step keeps copies to put back "
        "where it fails; known of modules and of the built-in decoder, not of other configs",
        "terrazzo/parallel/pipeline/buffer_snapshot.py",
    ),
    "memory.receive": Formula(
        "gradients under way to their ranks, and on CPU what arrives from the others",
        "terrazzo/engine/plan/gradient_wire.py, terrazzo/engine/comm/collectives.py",
    ),
}


FREED = ("gradients", "transient", "gathered", "unreduced", "receive")
"""Terms of what a step frees of weights and gradients."""

MOST_KEPT = 2**31
"""Bytes of freed memory that malloc can be told to keep at the end of a heap (terrazzo/engine/runtime/pages.py)."""


def memory_of(setup: Setup) -> MemoryFigures:
    """The memory of the fullest rank of `setup`, in bytes, at the fullest moment of a step."""
    stand = stand_ins(setup, 1)  # the second without the embeddings, which the first would count for all behind it
    held = {pp_rank: rank_terms(setup, pp_rank) for pp_rank in sorted(set(stand))}
    totals = {pp_rank: sum(term.value for term in each.terms) for pp_rank, each in held.items()}
    fullest = max(totals, key=lambda pp_rank: totals[pp_rank])
    upper = max(_bound(setup, pp_rank, each) for pp_rank, each in held.items())
    limiting_rank = _limiting_rank(setup, fullest, held[fullest].moment)
    memory = fullest_memory(setup, fullest, held[fullest], limiting_rank)
    return replace(memory, upper_bytes=upper, per_pp_rank=_per_pp_rank(setup, stand, totals))


def fullest_memory(setup: Setup, pp_rank: int, held: RankTerms, limiting_rank: str) -> MemoryFigures:
    """Memory whose fullest rank is `pp_rank` along pp and holds these terms, with all that lies around them."""
    terms, (host, disk) = held.terms, tier_terms(setup, pp_rank)
    return MemoryFigures(
        terms=terms,
        upper_bytes=_bound(setup, pp_rank, held),
        reserved_bytes=reserved_bytes(setup, terms),
        device_bytes=device_bytes(setup, terms),
        limiting_rank=limiting_rank,
        per_pp_rank=(float(sum(term.value for term in terms)),),
        host=host,
        disk=disk,
        disk_writes=disk_writes(setup, pp_rank),
        process=process_term(setup),
        capacity_bytes=setup.cluster.device.memory_bytes,
        ranks_per_host=setup.cluster.ranks_per_host,
        host_capacity_bytes=setup.cluster.host_memory_bytes,
        disk_capacity_bytes=setup.cluster.disk_bytes,
        on_host=setup.cluster.device.kind == "cpu",
        uncounted=not setup.model.computes,
    )


def _bound(setup: Setup, pp_rank: int, held: RankTerms) -> float:
    return held.upper_bytes + _kept_freed(setup, pp_rank, held.terms)


def _kept_freed(setup: Setup, pp_rank: int, terms: tuple[Term, ...]) -> float:
    """Bytes that malloc keeps, on a CPU, of weights and gradients that a step has freed.

    The engine has it keep as much as these take, so that a step need not ask the kernel for them again: what is held at
    other moments than the fullest, and up to `MOST_KEPT` of what is held then too, since a thread's heap serves that
    thread alone (`python -m benchmarks.planner.resident`). Where states are on drives malloc gives all back.
    """
    if setup.cluster.device.kind != "cpu" or setup.model.bare or setup.plan.on_disk:
        return 0.0
    gradients = sum(term.value for term in on_device(setup, pp_rank) if term.name == "gradients")
    freed = gradients + rank_peak(setup, pp_rank, states_only=True).total
    elsewhere = freed - sum(term.value for term in terms if term.name in FREED)
    return max(elsewhere, min(freed, MOST_KEPT))


def _per_pp_rank(setup: Setup, stand: Sequence[int], totals: Mapping[int, float]) -> tuple[float, ...]:
    """Allocated bytes of every rank along pp: those of the one that stands for it, with its own micro-batches in flight
    and messages; no other difference is counted.
    """
    saved = {other: _saved_bytes(setup, other) for other in totals}
    sent = [sum(term.value for term in _messages(setup, pp_rank)) for pp_rank in range(setup.mesh.pp)]
    return tuple(
        totals[other]
        - (in_flight(setup, other) - in_flight(setup, pp_rank)) * saved[other]
        - sent[other]
        + sent[pp_rank]
        for pp_rank, other in enumerate(stand)
    )


def _saved_bytes(setup: Setup, pp_rank: int) -> float:
    """Activations of one micro-batch on all blocks of a rank along pp that stay on the device."""
    return sum(block_activations(setup, block).stays * count for block, count in saving_blocks(setup, pp_rank))


def _limiting_rank(setup: Setup, pp_rank: int, moment: str) -> str:
    ranks = setup.mesh.pp
    if ranks == 1:
        return f"every rank alike, fullest {moment}"
    waiting = f"{in_flight(setup, pp_rank):.3g} micro-batches in flight"
    held = {0: f"the embeddings and {waiting}", ranks - 1: "the head and the logits"}.get(pp_rank, waiting)
    return f"rank {pp_rank} of {ranks} along pp, with {held}, fullest {moment}"


# -- one rank along pp ---------------------------------------------------------------------------------------------


class RankTerms(NamedTuple):
    """What a rank holds at its fullest moment, and that moment in words.

    Attributes:
        upper_bytes: a bound for what its device must have at any moment.
    """

    terms: tuple[Term, ...]
    moment: str
    upper_bytes: float


def rank_terms(setup: Setup, pp_rank: int) -> RankTerms:
    """The terms of rank `pp_rank` along pp at its fullest moment."""
    states = on_device(setup, pp_rank)
    if setup.model.bare:
        return RankTerms(states, "at rest", upper_bytes(setup, states))
    peak = rank_peak(setup, pp_rank)
    resting = tuple(term for term in states if term.name != "gradients")
    around = _around(setup, pp_rank)
    moving = (
        _moving_term(setup, pp_rank, name, value, extra)
        for name, value, extra in zip(HELD_KINDS, peak.parts, _upper_extras(setup, pp_rank, peak), strict=True)
        if value or name == "gradients"
    )
    upper = upper_bytes(setup, (*resting, *around), peak.upper)
    return RankTerms((*resting, *moving, *around), peak.moment, upper)


def _moving_term(setup: Setup, pp_rank: int, name: str, value: float, extra: float) -> Term:
    return Term(name, value, value + extra, f"memory.{name}", _inputs(setup, pp_rank, name))


def _around(setup: Setup, pp_rank: int) -> tuple[Term, ...]:
    moved, workspace = moved_activations(setup, pp_rank), float(workspace_bytes(setup))
    terms = [*_messages(setup, pp_rank)]
    if moved:
        terms.append(Term("staging", 2 * moved, 2 * moved, "memory.staging", {"inputs of one block": moved}))
    if workspace:
        terms.append(Term("workspace", workspace, workspace, "memory.workspace", {"bytes each": workspace / 2}))
    return tuple(terms)


def _messages(setup: Setup, pp_rank: int) -> Iterator[Term]:
    """What a rank of the engine's pipeline hands to the next and the last one, and keeps until the step ends."""
    if not setup.staged or not setup.model.computes:
        return
    chunks, ranks = setup.virtual_stages, setup.mesh.pp
    one = setup.residual_bytes
    onward = in_flight(setup, pp_rank) * (chunks - (pp_rank == ranks - 1))
    back = float(setup.micro_batches * (chunks - (pp_rank == 0)))
    value = (onward + back + 2) * one
    inputs = {"bytes of one": one, "activations": onward, "gradients": back, "asked for": 2.0}
    yield Term("messages", value, value, "memory.messages", inputs)


def rank_peak(setup: Setup, pp_rank: int, states_only: bool = False) -> Peak:
    """What rank `pp_rank` along pp holds beside resting weights and optimizer state, at its fullest moment.

    Args:
        states_only: without activations, logits, finished gradients and what elementwise updates take: the engine's
            `transient_bytes`.
    """
    under_way = under_way_bytes(setup, pp_rank)
    plain = StepSettings(
        prefetch=setup.prefetch,
        micro_batches=setup.micro_batches,
        turns=last_turns(setup, pp_rank) if setup.staged else (),
        local=setup.sums_locally,
        whole=setup.as_megatron,
        gradual=not setup.compile,
        with_gradients=not states_only,
        update=max(float(matrix_updates(setup, pp_rank).held_bytes), outer_held_bytes(setup, pp_rank) - under_way),
        buffers=_buffer_bytes(setup, pp_rank) if setup.staged else 0.0,
        under_way=under_way,
        updates_run_on=setup.offload.step != "synchronous",
    )
    rows = list(_rows(setup, pp_rank))
    if states_only:
        bare = [
            StepUnit(unit_events(unit, own), number, chunk=chunk, forward_only=unit.forward_only)
            for unit, number, own, chunk in rows
        ]
        return peak_of(bare, plain)
    is_last = pp_rank == setup.mesh.pp - 1
    units = []
    for unit, number, own, chunk in rows:
        activations = _activations(setup, unit)
        gradient = 0 if unit.is_root and not is_last else trained_unit(unit, own).largest_grad
        working = activations.working + gradient + _cast_bytes(setup, unit)
        events = unit_events(unit, own)
        units.append(StepUnit(events, number, activations.stays, working, chunk, unit.forward_only))
    head = head_activations(setup)
    settings = replace(
        plain,
        loss=head.loss * is_last,
        logits=head.logits * is_last,
        in_flight=(in_flight(setup, pp_rank) - 1) * _saved_bytes(setup, pp_rank)
        + (in_flight(setup, pp_rank) - 1) * head.saved * (is_last and setup.pipeline != "1f1b"),
        update=max(plain.update, _update_bytes(setup, pp_rank)),
        upper_shares=tuple(map(mul, _upper_shares(setup, pp_rank), map(upper_share, HELD_KINDS))),
        loss_extra=head.loss_extra * is_last,
    )
    return peak_of(units, settings)


def _activations(setup: Setup, unit: UnitShape) -> BlockActivations:
    """What a unit keeps and makes; one that no gradient goes back through keeps nothing, and makes what it saves."""
    found = block_activations(setup, unit.block) if unit.block else BlockActivations(0.0, 0.0, 0.0, 0.0)
    return BlockActivations(0.0, 0.0, found.saved + found.recomputed, 0.0) if unit.forward_only else found


def _buffer_bytes(setup: Setup, pp_rank: int) -> float:
    blocks = sum(unit.buffer_bytes * count for unit, count in units_on(setup, pp_rank) if not unit.is_root)
    return float(setup.model.root.buffer_bytes + blocks)


class _ChunkRow(NamedTuple):
    """A `PlacedUnit`, and the number of the rank's stage that it is in."""

    unit: UnitShape
    number: int
    placement: Placement
    chunk: int


def _rows(setup: Setup, pp_rank: int) -> Iterator[_ChunkRow]:
    """The units of a rank along pp in the order in which they run; rows of equal ones are cut where a stage ends."""
    if setup.virtual_stages == 1 or not setup.staged:
        yield from (_ChunkRow(*placed, 0) for placed in placed_units(setup, pp_rank))
        return
    left, chunk = list(blocks_of_chunks(setup, pp_rank)), 0
    for unit, number, own in placed_units(setup, pp_rank):
        if unit.is_root:
            yield _ChunkRow(unit, number, own, 0 if pp_rank == 0 else len(left) - 1)
            continue
        while number:
            while not left[chunk]:
                chunk += 1
            here = min(number, left[chunk])
            left[chunk], number = left[chunk] - here, number - here
            yield _ChunkRow(unit, here, own, chunk)


def _cast_bytes(setup: Setup, unit: UnitShape) -> float:
    """What a block needs to bring a product's operands to 8 bits: both codes, and eagerly one of them in fp32."""
    if setup.matmul != "fp8" or unit.block is None:
        return 0.0
    rows, parts = setup.rank_tokens, setup.mesh.tp
    matrices = [each for each in unit.tensors if each.role == "matrix"]
    return max((_operand_bytes(setup, each.shape, rows) / parts for each in matrices), default=0.0)


def _operand_bytes(setup: Setup, shape: Sequence[int], rows: float) -> float:
    numels = (shape[-1] * shape[-2], rows * shape[-1], rows * shape[-2])
    return sum(sorted(numels)[-2:]) + (0 if setup.compile else 4 * max(numels))


def _update_bytes(setup: Setup, pp_rank: int) -> float:
    """What the optimizer step needs for itself on the device.

    `foreach` updates all tensors at once and so holds a root for each; `loop` one after the other, with a quotient
    beside the root. Matrices that are updated whole are apart: see `matrix_updates`.
    """
    spec, precision = setup.optimizer, setup.precision
    narrow = precision.narrow
    if narrow is None and (setup.update_kernel == "fused" or not spec.takes_root or spec.moment_bytes is not None):
        return 0.0
    rows = placed_units(setup, pp_rank)
    numels = [(trained_unit(u, own).optim_numel, n) for u, n, own in rows if own.tiers.optim == "device"]
    if narrow is not None:
        largest = max((numel for numel, _ in numels), default=0)
        return float(narrow.blocks.scratch_bytes(largest, setup.cluster.device.kind))
    at_once = setup.update_kernel == "foreach" and precision.moments == precision.master
    if at_once:
        return float(sum(numel * count for numel, count in numels) * precision.master.itemsize)
    return float(2 * max((numel for numel, _ in numels), default=0) * precision.master.itemsize)


# -- bounds and inputs ---------------------------------------------------------------------------------------------


def _upper_extras(setup: Setup, pp_rank: int, peak: Peak) -> list[float]:
    """What each part of the fullest moment may be more than expected."""
    shares = _upper_shares(setup, pp_rank)
    extras = [part * (share - 1) for part, share in zip(peak.parts, shares, strict=True)]
    if peak.moment == AT_LOSS:
        extras[LOGITS] = head_activations(setup).loss_extra
    return extras


def _upper_shares(setup: Setup, pp_rank: int) -> list[float]:
    """How many times what is expected of a kind may be held: other kernels, other frameworks. The loss is apart."""
    shares = [1.0] * len(HELD_KINDS)
    saved = upper = 0.0
    for unit, count in units_on(setup, pp_rank):
        if unit.block is not None:
            activations = _activations(setup, unit)
            saved += activations.stays * count
            upper += (activations.saved_upper - activations.moved) * count
    if saved:
        shares[ACTIVATIONS] = upper / saved
    precision = setup.precision
    sums_up = setup.micro_batches > 1 and setup.sums_locally
    if sums_up and precision.compute.itemsize < precision.accumulate.itemsize:
        shares[UNREDUCED] = 1 + precision.compute.itemsize / precision.accumulate.itemsize
    return shares


def _inputs(setup: Setup, pp_rank: int, name: str) -> dict[str, float]:
    """The numbers behind a part of the peak."""
    mesh, tokens = setup.mesh, setup.rank_tokens
    if name == "logits":
        return {"tokens": tokens, "vocabulary": float(setup.model.logits), "tp": float(mesh.tp)}
    if name in ("activations", "working"):
        return {"tokens": tokens, "tp": float(mesh.tp), **_block_inputs(setup, pp_rank, name)}
    return {
        "prefetch": float(setup.prefetch),
        "micro-batches": float(setup.micro_batches),
        "units": float(sum(count for _, count in units_on(setup, pp_rank))),
    }


def _block_inputs(setup: Setup, pp_rank: int, name: str) -> dict[str, float]:
    blocks = saving_blocks(setup, pp_rank)
    if not blocks:
        return {}
    block, _ = max(blocks, key=lambda pair: pair[1])
    activations = block_activations(setup, block)
    sizes = {
        "h": float(block.hidden),
        "q": float(block.heads * block.head_dim),
        "kv": float(block.kv_heads * block.head_dim),
        "f": float(block.ffn),
    }
    if name == "working":
        return {**sizes, "recomputed": activations.recomputed, "gradients of activations": activations.gradients}
    counts = {"blocks": float(sum(count for _, count in blocks)), "micro-batches in flight": in_flight(setup, pp_rank)}
    return {**sizes, **counts, "saved by one block": activations.saved}
