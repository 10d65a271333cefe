"""Every sensible way of running a model on some number of devices: what fits is ranked, what does not says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.errors import BadInput
from terrazzo.messages import GIB
from terrazzo.planner.assemble import assemble, memory_under
from terrazzo.planner.choice.candidates import (
    is_round,
    meshes,
    model_parallel,
    modes_and_sizes,
    offloaded_strategies,
    strategies,
    variants,
)
from terrazzo.planner.choice.ranking import pareto, rank_key, simplest_first, tokens_per_s
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.layout.placement import stand_ins
from terrazzo.planner.memory.tiers import on_device
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier, Refusal
from terrazzo.planner.report.words import HOSTS, LABELS
from terrazzo.planner.setup.build_setup import build_cluster, build_setup, counts_of, settled, shape_of
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration

__all__ = ["search", "spread"]

VARIED = 8
"""How many of the best that were found on one number of devices are tried with other schedules and shard groups."""


SUMS = ("unreduced", "sums")
"""Terms, of the device's memory and the host's, that are there in a step of several micro-batches alone."""

SPARE = 0.1
"""At most what the allocator keeps beside these, as a share of them."""


def search(request: Request, calibration: Calibration | None = None, *, least_memory: bool = False) -> Frontier:
    """Compare all strategies, meshes, checkpointing modes and micro-batches that a request leaves open.

    Without `request.parallel` only the data axes vary, and the others are as given; without `request.offload`
    only strategies that keep all states on the device. What is known to fail in `request.framework` is refused.

    Args:
        least_memory: try the smallest micro-batch and all of a global batch at once alone, of which one needs least.

    Raises:
        BadInput: the request itself is impossible; a choice that is impossible is refused instead.
    """
    original, request = request, replace(request, model=shape_of(request.model))
    counts = counts_of(request, build_cluster(request, 1).device.per_node)
    if not isinstance(request.gpus, int):
        counts = spread(counts)
    tried = _Tried(request, calibration, least_memory)
    for count in counts:
        tried.try_all(tuple(meshes(settled(replace(request, gpus=count)))))
    if not tried.considered:
        check(build_setup(replace(request, gpus=counts[0])))  # says why no mesh is possible
    ranked = simplest_first(sorted(tried.fitting, key=rank_key(request)))
    found = Frontier(original, ranked, pareto(ranked), tried.refused(), tried.considered)
    return found if ranked else replace(found, closest=_estimated(found.nearest, calibration))


def _estimated(miss: Refusal | None, calibration: Calibration | None) -> Estimate | None:
    """All that is said of a setup that memory refused."""
    if miss is None or miss.setup is None or miss.memory is None:
        return None
    return assemble(miss.setup, miss.memory, calibration, findings(miss.setup))


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of devices among many that are a power of two, or three times one, and the ends."""
    return tuple(count for count in counts if count in (counts[0], counts[-1]) or is_round(count))


class _Tried:
    """Collects estimates that fit, and why the others do not."""

    def __init__(self, request: Request, calibration: Calibration | None, least_memory: bool) -> None:
        self.request, self.calibration, self.least_memory = request, calibration, least_memory
        self.fitting: list[Estimate] = []
        self.refusals: dict[tuple[str, int], Refusal] = {}
        self.considered = 0

    def refused(self) -> tuple[Refusal, ...]:
        """The strategies of which nothing fits, by number of devices, what lacks least first; what memory is no reason
        for comes last.
        """
        fitting = {(each.setup.plan.name, each.setup.cluster.count) for each in self.fitting}
        refused = [refusal for key, refusal in self.refusals.items() if key not in fitting]
        return tuple(sorted(refused, key=lambda refusal: (refusal.gpus, refusal.overrun)))

    def try_all(self, choices: tuple[Request, ...]) -> None:
        """All strategies on all meshes; those with offload, which are slower, only where nothing else surely fits."""
        before = len(self.fitting)
        for choice in choices:
            for strategy in strategies(choice):
                self.try_strategy(replace(choice, strategy=strategy))
        self._vary(self.fitting[before:])
        if not self.request.offload or self.request.strategy is not None:
            return
        if not any(each.memory.fits_surely is not False for each in self.fitting[before:]):
            for choice in choices:
                for strategy in offloaded_strategies(choice):
                    self.try_strategy(replace(choice, strategy=strategy))

    def try_strategy(self, choice: Request) -> None:
        """One strategy on one mesh; where the groups that are its default do not fit, with larger ones, too.

        Beside model parallelism these are tried of a strategy that is named alone: others shard there in one group.
        """
        before = len(self.fitting)
        setup = self._try_modes(choice)
        if setup is None or not setup.plan.groups or choice.dp_replicate is not None:
            return
        if self.request.strategy is None and model_parallel(choice):
            return
        replicas = setup.mesh.dp_replicate
        while len(self.fitting) == before and replicas % 2 == 0 and replicas > 2:  # one group is what zero3 has
            replicas //= 2
            self._try_modes(replace(choice, dp_replicate=replicas))

    def _try_modes(self, choice: Request) -> Setup | None:
        """A strategy with every checkpointing mode and micro-batch; how it is set up, None where it cannot be."""
        modes, sizes = modes_and_sizes(choice)
        if self.least_memory:
            sizes = (sizes[0], *sizes[1:][-1:])
        untried = len(modes) * len(sizes)
        setup = self._first_possible(replace(choice, checkpointing=modes[0]), sizes, untried)
        if setup is None:
            return None
        if setup.plan.groups and setup.mesh.shard_ranks == 1:
            self._refuse(choice, f"{setup.plan.name} splits nothing over groups of one rank.", untried)
        elif (floor := _states_bytes(setup)) > (capacity := setup.cluster.device.memory_bytes or math.inf):
            leanest = build_setup(replace(choice, micro_batch=setup.micro_batch, checkpointing=modes[-1]))
            if reason := _refusal(findings(leanest)):  # then it is not what comes nearest
                self._refuse(choice, reason, untried)
                return setup
            reason = f"weights, gradients and optimizer alone need {_gib(floor)} GiB; the device has {_gib(capacity)}."
            self._refuse(choice, reason, untried, leanest)
        else:
            largest = 0
            for mode in modes:
                useful = tuple(size for size in sizes if size == sizes[0] or size > largest)
                largest = max(largest, self._grow(replace(choice, checkpointing=mode), useful))
        return setup

    def _first_possible(self, choice: Request, sizes: tuple[int, ...], untried: int) -> Setup | None:
        """The setup with the first micro-batch that can be; with none, the strategy is refused for the first reason."""
        refused = ""
        for size in sizes:
            try:
                setup = build_setup(replace(choice, micro_batch=size))
                check(setup)
            except BadInput as error:
                refused = refused or str(error)
                continue
            return setup
        self._refuse(choice, refused, untried)
        return None

    def _vary(self, fitting: Sequence[Estimate]) -> None:
        """What the best of what was found on one number of devices leaves untried: micro-batches between two of those
        that were tried, other schedules, shard groups and ranks that share experts.

        Of schedules those that would be the best if nothing waited in them.
        """
        key = rank_key(self.request)
        ahead = sorted(fitting, key=key)[:VARIED]
        best = max(map(tokens_per_s, ahead), default=0.0)
        tried: list[Request] = []
        for each in ahead:
            for variant in variants(self.request, each.setup, schedules=_without_bubble(each) >= best):
                if variant not in tried:
                    tried.append(variant)
                    self._grow(variant, (variant.micro_batch or 1,))

    def _grow(self, choice: Request, sizes: tuple[int, ...]) -> int:
        """Larger and larger micro-batches, as long as they fit and help; the largest that surely fits, or 0.

        Behind one that does not fit, all of a batch at once is the last that can: nothing is summed up then.
        """
        sure, rate, left = 0, 0.0, list(sizes)
        while left:
            size = left.pop(0)
            self.considered += 1
            try:
                setup = build_setup(replace(choice, micro_batch=size))
                memory = memory_under(setup, self.calibration)
            except BadInput as error:
                self._refuse(choice, str(error), 0)
                continue
            known = findings(setup)
            if reason := _refusal(known):
                self._refuse(choice, reason, 0)
                continue
            if reason := _too_large(setup, memory):
                if not rate:
                    self._refuse(choice, reason, 0, setup, memory)
                left = left[-1:] if choice.global_batch and _fits_without_sums(memory) else []
                continue
            estimate = assemble(setup, memory, self.calibration, known)
            self.fitting.append(estimate)
            sure = sure if memory.fits_surely is False else size
            full = tokens_per_s(estimate) * setup.rows / setup.global_batch  # a larger one may leave fewer rows empty
            if full < rate:
                break
            rate = full
        return sure

    def _refuse(
        self,
        choice: Request,
        reason: str,
        candidates: int,
        setup: Setup | None = None,
        memory: MemoryFigures | None = None,
    ) -> None:
        """Count `candidates` that were not tried one by one (0: one that was), and keep the nearest miss.

        Args:
            setup: what its memory is too large for; memory: of it, computed here if not given.
        """
        self.considered += candidates
        if setup is not None and memory is None:
            memory = memory_under(setup, self.calibration)
        needed_bytes = None if memory is None else memory.expected_bytes
        assert isinstance(choice.gpus, int)
        assert choice.plan is not None
        strategy = choice.plan.name
        known = self.refusals.get((strategy, choice.gpus))
        refusal = Refusal(strategy, choice.gpus, reason, max(candidates, 1), needed_bytes, setup, memory)
        if known is not None:
            nearest = min(known, refusal, key=lambda one: one.overrun)
            refusal = replace(nearest, candidates=known.candidates + refusal.candidates)
        self.refusals[strategy, choice.gpus] = refusal


def _without_bubble(estimate: Estimate) -> float:
    """Tokens per second if no stage waited for another; 0 where no time is known."""
    if estimate.time is None:
        return 0.0
    idle = sum(term.value for term in estimate.time.terms if term.formula == "time.bubble")
    return tokens_per_s(estimate) * estimate.time.step_s / (estimate.time.step_s - idle)


def _refusal(known: Sequence[PlanFinding]) -> str:
    return next((str(each) for each in known if each.severity == "refuse"), "")


def _states_bytes(setup: Setup) -> float:
    """Bytes of states on the device, of the rank along pp that has most."""
    return max(sum(term.value for term in on_device(setup, pp_rank)) for pp_rank in set(stand_ins(setup)))


def _too_large(setup: Setup, memory: MemoryFigures) -> str:
    """Why a setup does not fit on the device, its host or its disks; empty where it does."""
    if memory.fits is not False:
        return ""
    full = memory.overfull[0]
    largest, mode = max(full.terms, key=lambda term: term.value), setup.checkpointing_name
    label = LABELS.get(largest.name, largest.name)
    numbers = f"{_gib(full.expected)} of {_gib(full.capacity or 0)} GiB"
    if full.name != "device":
        amount = _gib(memory.ranks_per_host * largest.value)
        return f"the {HOSTS[full.name]} of each host would hold {numbers}, of which {amount} {label}."
    with_mode = "" if mode == "none" else f" and {mode} activation checkpointing"
    which = f"of which {_gib(largest.value)} {label}"
    return f"with micro-batch {setup.micro_batch}{with_mode}, {numbers} are expected, {which}."


def _fits_without_sums(memory: MemoryFigures) -> bool:
    """Whether what is too large would fit if no gradients were added up over micro-batches."""
    full = memory.overfull[0]
    sums = sum(term.value for term in full.terms if term.name in SUMS)
    return 0 < full.expected - (full.capacity or 0) < (1 + SPARE) * sums


def _gib(value: float) -> str:
    gib = value / GIB
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}"
