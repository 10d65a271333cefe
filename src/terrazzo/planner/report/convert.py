"""Estimates in the models of the JSON."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.messages import GIB
from terrazzo.planner.figures import MemoryFigures, Term, TimeFigures, TrafficFigures
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.schema import (
    CollectiveReport,
    EditRow,
    FindingReport,
    FrontierRow,
    MemoryReport,
    PlanReport,
    RoomReport,
    SetupReport,
    TermReport,
    TimeReport,
    TrafficReport,
)
from terrazzo.planner.report.words import GB, blocker, checkpointing_text, mesh_sizes, precision_name
from terrazzo.planner.setup.setup import Setup

__all__ = ["frontier_row", "report_of"]


def report_of(estimate: Estimate) -> PlanReport:
    """The whole of one estimate."""
    memory = estimate.memory
    return PlanReport.of(
        memory,
        setup=_setup(estimate.setup),
        memory=_memory(memory),
        time=_time(estimate.time) if estimate.time else None,
        no_time=estimate.no_time,
        traffic=_traffic(estimate.traffic),
        warnings=estimate.notes,
        blocker=blocker(memory),
        edits=tuple(EditRow.of(edit, plan=frontier_row(edit.estimate)) for edit in estimate.edits),
        findings=tuple(map(FindingReport.of, estimate.findings)),
    )


def frontier_row(estimate: Estimate) -> FrontierRow:
    """One estimate in short."""
    setup, memory, time = estimate.setup, estimate.memory, estimate.time
    return FrontierRow.of(
        setup,
        strategy=setup.plan.name,
        mesh=mesh_sizes(setup.mesh),
        gpus=setup.cluster.count,
        activation_checkpointing=checkpointing_text(setup),
        allocated_gib=memory.allocated_bytes / GIB,
        expected_gib=memory.expected_bytes / GIB,
        device_gib=memory.device_bytes / GIB,
        upper_gib=memory.most_bytes / GIB,
        fits=memory.fits,
        fits_surely=memory.fits_surely,
        runs_now=estimate.runs_now,
        step_s=time.step_s if time else None,
        tokens_per_s_per_gpu=time.tokens_per_s_per_gpu if time else None,
        mfu=time.mfu if time else None,
        bound_by=time.bound_by if time else None,
    )


def _setup(setup: Setup) -> SetupReport:
    return SetupReport.of(
        setup,
        model=setup.model.name,
        parameters=setup.model.numel,
        active_parameters=setup.model.active_numel,
        gpu=setup.cluster.device.name,
        gpus=setup.cluster.count,
        nodes=setup.cluster.nodes,
        strategy=setup.plan.name,
        plan={state: str(place) for state, place in setup.plan.places().items()},
        mesh=mesh_sizes(setup.mesh),
        precision=precision_name(setup),
        optimizer=setup.optimizer.name,
        activation_checkpointing=checkpointing_text(setup),
    )


def _memory(memory: MemoryFigures) -> MemoryReport:
    return MemoryReport(
        expected_gib=memory.expected_bytes / GIB,
        expected_gb=memory.expected_bytes / GB,
        allocated_gib=memory.allocated_bytes / GIB,
        allocated_gb=memory.allocated_bytes / GB,
        upper_gib=memory.most_bytes / GIB,
        upper_gb=memory.most_bytes / GB,
        reserved_gib=memory.reserved_bytes / GIB,
        device_gib=memory.device_bytes / GIB,
        capacity_gib=None if memory.capacity_bytes is None else memory.capacity_bytes / GIB,
        terms={term.name: term.value / GIB for term in memory.terms},
        breakdown=_terms(memory.terms),
        per_pp_rank_gib=tuple(value / GIB for value in memory.per_pp_rank),
        host=_terms(memory.host_terms),
        disk=_terms(memory.disk),
        disk_writes=_terms(memory.disk_writes),
        hosts=tuple(
            RoomReport.of(
                room,
                expected_gib=room.expected / GIB,
                upper_gib=room.upper / GIB,
                capacity_gib=None if room.capacity is None else room.capacity / GIB,
            )
            for room in memory.rooms
            if room.name != "device"
        ),
    )


def _traffic(traffic: TrafficFigures) -> TrafficReport:
    return TrafficReport(
        total_gb=traffic.total_bytes / GB,
        collectives=tuple(CollectiveReport.of(term, gb=term.value / GB) for term in traffic.collectives),
        links_gb={link: value / GB for link, value in traffic.links.items()},
    )


def _time(time: TimeFigures) -> TimeReport:
    terms = {term.name: term.value for term in time.terms}
    return TimeReport.of(time, terms=terms, breakdown=_terms(time.terms))


def _terms(terms: Iterable[Term]) -> tuple[TermReport, ...]:
    return tuple(map(TermReport.of, terms))
