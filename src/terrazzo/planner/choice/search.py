"""Every way of running a model that a request leaves open: what fits is ranked, what does not says why.

A walk through five choices, each inside of those before it; `tried_meshes` and `candidates` say what may be chosen:

    number of devices / mesh / strategy / checkpointing mode / micro-batch

Everything is tried but what cannot come first, by one of these rules. Memory and time are what `assemble` says; none of
the rules has figures of its own.

    states      Where states alone are too large, so they are in every mode and micro-batch: one refusal for all.
    too large   Memory grows with the micro-batch. Behind one that is too large all of a batch at once is the only one
                that may fit, since nothing is added up then.
    slower      A larger micro-batch shares among more tokens what a step costs once. Behind the first that is slower,
                but for rows that it leaves empty, no other is tried.
    recomputed  Modes come in order of the time that they cost. One that costs more begins where those before it have
                no room for certain, with its smallest micro-batch besides, for those who want its memory.
    groups      Larger shard groups than those of one host send more over the network: only where those do not fit.
    offload     Copies to a host are slower than any exchange: only where nothing else surely fits.

Values of a choice are so far apart that what lies between them matters little, and end where more has hardly ever been
better. At the end, on each number of devices, `neighbours` of what came first are tried; and as long as a step over one
of these ends makes the best better, the next one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.planner.assemble import assemble, memory_under
from terrazzo.planner.choice.candidates import modes_and_sizes, offloaded_strategies, shard_groups, strategies
from terrazzo.planner.choice.neighbours import beyond, neighbours, steps_beyond
from terrazzo.planner.choice.ranking import pareto, rank_key, simplest_first, tokens_per_s
from terrazzo.planner.choice.refusals import Refusals, fits_without_sums, states_too_large, too_large
from terrazzo.planner.choice.tried_meshes import is_round, meshes
from terrazzo.planner.figures import MemoryFigures
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.gate.rule import PlanFinding
from terrazzo.planner.layout.placement import stand_ins
from terrazzo.planner.memory.tiers import on_device
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier, Refusal
from terrazzo.planner.setup.build_setup import build_cluster, build_setup, counts_of, settled, shape_of
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration

__all__ = ["search", "spread"]


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
    walk = _SearchWalk(calibration, least_memory)
    for count in counts:
        walk.try_devices(settled(replace(request, gpus=count)))
    if not walk.considered:
        check(build_setup(replace(request, gpus=counts[0])))  # says why no mesh is possible
    ranked = simplest_first(sorted(walk.fitting, key=rank_key(request)))
    found = Frontier(original, ranked, pareto(ranked), walk.refusals.beside(ranked), walk.considered)
    if not ranked:
        return replace(found, closest=_estimated(found.nearest, calibration))
    best = ranked[0].setup
    return replace(found, beyond=beyond(request, best, walk.meshes[best.cluster.count]))


def _estimated(miss: Refusal | None, calibration: Calibration | None) -> Estimate | None:
    """All that is said of a setup that memory refused."""
    if miss is None or miss.setup is None or miss.memory is None:
        return None
    return assemble(miss.setup, miss.memory, calibration, findings(miss.setup))


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """The numbers of devices among many that are a power of two, or three times one, and the ends."""
    return tuple(count for count in counts if count in (counts[0], counts[-1]) or is_round(count))


class _Tried(NamedTuple):
    """What became of a candidate: its estimate where it fits, else what it takes where that is too much."""

    fitting: Estimate | None = None
    too_large: MemoryFigures | None = None


REFUSED = _Tried()
"""Not for its memory."""


class _SearchWalk:
    """What was found so far: estimates of what fits, and why the rest does not run."""

    def __init__(self, calibration: Calibration | None, least_memory: bool) -> None:
        self.calibration, self.least_memory = calibration, least_memory
        self.meshes: dict[int, tuple[Request, ...]] = {}
        self.fitting: list[Estimate] = []
        self.refusals = Refusals()

    @property
    def considered(self) -> int:
        """All candidates, those among them that a rule has spared."""
        return len(self.fitting) + self.refusals.candidates

    def try_devices(self, request: Request) -> None:
        """All that a request leaves open on its number of devices."""
        assert isinstance(request.gpus, int)
        before, on_meshes = len(self.fitting), tuple(meshes(request))
        self.meshes[request.gpus] = on_meshes
        self._try_strategies(on_meshes, strategies)
        for neighbour in neighbours(request, self.fitting[before:]):
            self._grow(neighbour, (neighbour.micro_batch or 1,))
        self._go_on(request, before, on_meshes)
        sure = any(each.memory.fits_surely is not False for each in self.fitting[before:])
        if request.offload and request.plan is None and not sure:
            self._try_strategies(on_meshes, offloaded_strategies)

    def _go_on(self, request: Request, before: int, tried: tuple[Request, ...]) -> None:
        """Go beyond what is tried of every plan, for as long as it makes the best of `fitting[before:]` better."""
        key, best, taken = rank_key(request), None, list[Request]()
        while (first := min(self.fitting[before:], key=key, default=None)) is not best:
            best = first
            assert best is not None
            for step in [each for each in steps_beyond(request, best, tried) if each not in taken]:
                taken.append(step)
                sizes = modes_and_sizes(step).sizes
                self._grow(step, tuple(size for size in sizes if 2 * size >= best.setup.micro_batch) or sizes[-1:])

    def _try_strategies(self, choices: Iterable[Request], plans: Callable[[Request], Iterable[Plan]]) -> None:
        """Each strategy of each mesh, in the first shard groups with which anything of it fits."""
        for choice in choices:
            for plan in plans(choice):
                before = len(self.fitting)
                for grouped in shard_groups(replace(choice, strategy=plan), named=choice.plan is not None):
                    self._try_modes(grouped)
                    if len(self.fitting) > before:
                        break

    def _try_modes(self, choice: Request) -> None:
        """One strategy in groups of one size with every checkpointing mode and micro-batch."""
        modes, sizes = modes_and_sizes(choice)
        if self.least_memory:
            sizes = (sizes[0], *sizes[1:][-1:])
        try:
            setup = _first_possible(replace(choice, checkpointing=modes[0]), sizes)
        except BadInput as error:
            self.refusals.add(choice, str(error), len(modes) * len(sizes))
            return
        if (states := _states_bytes(setup)) > (capacity := setup.cluster.device.memory_bytes or math.inf):
            leanest = build_setup(replace(choice, micro_batch=setup.micro_batch, checkpointing=modes[-1]))
            known = _refusal(findings(leanest))  # then it is not what comes nearest
            nearest = None if known else (leanest, memory_under(leanest, self.calibration))
            reason = known or states_too_large(states, capacity)
            self.refusals.add(choice, reason, len(modes) * len(sizes), nearest)
        else:
            sure = 0
            for mode in modes:
                useful = tuple(size for size in sizes if size == sizes[0] or size > sure)
                sure = max(sure, self._grow(replace(choice, checkpointing=mode), useful, setup))

    def _grow(self, choice: Request, sizes: tuple[int, ...], at_hand: Setup | None = None) -> int:
        """Larger and larger micro-batches, as long as they fit and get faster; the largest that surely fits, or 0.

        Args:
            at_hand: the setup of one of them, which need not be made again; or of another mode.
        """
        if at_hand is not None and at_hand.checkpointing_name != choice.checkpointing:
            at_hand = None
        sure, fastest, room = 0, 0.0, True
        for size in sizes:
            if not room and size != sizes[-1]:
                continue
            one = replace(choice, micro_batch=size)
            tried = self._try(one, at_hand if at_hand and at_hand.micro_batch == size else None)
            if tried.too_large is not None:
                if choice.global_batch is None or not fits_without_sums(tried.too_large):
                    break
                room = False
            elif (found := tried.fitting) is not None:
                sure = sure if found.memory.fits_surely is False else size
                rate = tokens_per_s(found) * found.setup.rows / found.setup.global_batch  # empty rows are no reason
                if rate < fastest:
                    break
                fastest = rate
        return sure

    def _try(self, choice: Request, setup: Setup | None) -> _Tried:
        """Note the estimate of one candidate, or why it is refused."""
        try:
            setup = setup or build_setup(choice)
            memory = memory_under(setup, self.calibration)
        except BadInput as error:
            self.refusals.add(choice, str(error))
            return REFUSED
        known = findings(setup)
        if reason := _refusal(known):
            self.refusals.add(choice, reason)
            return REFUSED
        if reason := too_large(setup, memory):
            self.refusals.add(choice, reason, 1, (setup, memory))
            return _Tried(too_large=memory)
        found = assemble(setup, memory, self.calibration, known)
        self.fitting.append(found)
        return _Tried(fitting=found)


def _first_possible(choice: Request, sizes: tuple[int, ...]) -> Setup:
    """The setup with the first micro-batch that can be. Raises: `BadInput` of the first one where none can."""
    first: BadInput | None = None
    for size in sizes:
        try:
            setup = build_setup(replace(choice, micro_batch=size))
            check(setup)
        except BadInput as error:
            first = first or error
            continue
        return setup
    assert first is not None
    raise first


def _refusal(known: Sequence[PlanFinding]) -> str:
    return next((str(each) for each in known if each.severity == "refuse"), "")


def _states_bytes(setup: Setup) -> float:
    """Bytes of states on the device, of the rank along pp that has most."""
    return max(sum(term.value for term in on_device(setup, pp_rank)) for pp_rank in set(stand_ins(setup)))
