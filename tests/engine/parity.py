"""Runs a case of the parity tests on the engine, and compares it bit by bit with the reference."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import ModelState, checkpoint_activations, compile_units, engine_of
from tests.engine.models import Block, base_model, batch, loss_of
from tests.engine.reference import CASTS, Recipe, Step, Sums, adamw, reference
from tests.helpers.cover import places
from tests.helpers.threads import run_in_threads

EACH = {  # axes that a micro-batch's gradient is reduced over when it is not added up locally: the plan's `grad` place
    **dict.fromkeys(("zero0", "zero1"), ""),
    **dict.fromkeys(("zero2", "zero3", "shard_grad_op", "hpz"), "SR"),
    **dict.fromkeys(("hybrid_shard", "hybrid_shard_zero2", "hfsdp"), "S"),
}
CUSTOM = tz.Plan(weight="S", between="-", grad="-", optim="S,R", name="weights-inside-states-everywhere")


@dataclass(frozen=True)
class Case:
    """One run: a plan on (replicas, shards) ranks; replicas None for a mesh of one axis.

    Attributes:
        precision: the preset that the reference follows.
        dtypes: what the engine is given instead of that preset.
        steps: the first finds the order of units, the second follows it, the third begins as all others do. Where
            parameters come and go with every step, a fourth has one come back.
        tiers: of states that do not rest on the device, as (state, tier).
    """

    plan: str | tz.Plan = "zero3"
    shards: int = 2
    replicas: int | None = None
    variant: str = "plain"
    precision: str = "fp32"
    dtypes: tz.Precision | None = None
    micro_batches: int = 1
    local: bool | None = None
    checkpointing: str = "none"
    compiled: bool = False
    denominator: float | None = None
    steps: int = 3
    tiers: tuple[tuple[str, str], ...] = ()
    offload: tz.Offload | None = None

    @property
    def ranks(self) -> int:
        return (self.replicas or 1) * self.shards

    @property
    def placed(self) -> tz.Plan:
        plan = tz.Plan.named(self.plan) if isinstance(self.plan, str) else self.plan
        return plan.on(**dict(self.tiers))

    @property
    def recipe(self) -> Recipe:
        """The reference of this run; nothing else of the case may matter to a single bit."""
        each = EACH[self.plan] if isinstance(self.plan, str) else "".join(self.plan.grad.axes)
        if self.local or self.micro_batches == 1:
            each = ""  # with one micro-batch the three orders are one
        form = self.dtypes.quantized_reduce or "" if self.dtypes else ""
        whole = bool(form) and not {"D", "R" if self.replicas else "S"} & set(self.placed.optim.axes)
        feedback = bool(form) and self.dtypes is not None and self.dtypes.error_feedback
        sums = Sums(self.replicas or 1, self.shards, each, form, whole, feedback)
        gather = self.dtypes.gather or "" if self.dtypes else ""
        run = Recipe(sums, self.variant, self.precision, self.micro_batches, self.steps, self.denominator)
        return replace(run, gather=gather, gathers_frozen=bool(self.placed.weight.axes)) if gather else run

    def mesh(self) -> DeviceMesh | None:
        if self.replicas is None:
            return None
        return init_device_mesh("cpu", (self.replicas, self.shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    def model(self) -> nn.Module:
        model = copy.deepcopy(base_model(self.variant))
        checkpoint_activations(model, self.checkpointing, units=[Block])
        if self.compiled:
            compile_units(model, units=[Block], backend="aot_eager")
        return model


def axes(case: Case) -> dict[str, object]:
    """What a case is for a cover: where its states lie, and on which mesh."""
    return {**places(case.plan), "mesh": (case.replicas, case.shards)}


Fragment = tuple[int, Tensor]
"""Where it starts in the flattened parameter, and its elements."""


@dataclass
class Trace:
    """What one rank saw of one step; tensors are this rank's parts alone."""

    losses: list[float]
    grads: dict[str, list[Fragment]] = field(default_factory=dict)
    weights: dict[str, list[Fragment]] = field(default_factory=dict)
    states: dict[tuple[str, str], list[Fragment]] = field(default_factory=dict)


@dataclass
class Runner:
    """Trains a case on this rank.

    Attributes:
        tune: sees (model, optimizer) after each last backward, before the step.
        after_step: a scheduler's step.
    """

    case: Case
    rank: int
    make_optimizer: Callable[[nn.Module], Optimizer] = lambda model: adamw(model.parameters())
    tune: Callable[[nn.Module, Optimizer], Any] = lambda model, optimizer: None
    after_step: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        case, model = self.case, self.case.model()
        self.model, self.optimizer = tz.shard(
            model,
            self.make_optimizer(model),
            case.placed,
            units=[Block],
            precision=case.dtypes or case.precision,
            mesh=case.mesh(),
            offload=case.offload,
        )
        self.model.set_gradient_denominator(case.denominator)
        self.steps_done = 0

    def step(self) -> Trace:
        trace = Trace(self.backward())
        trace.grads = gradients_of(self.model)
        self.update()
        return self.look(trace)

    def backward(self) -> list[float]:
        """All micro-batches of a step; their losses."""
        case = self.case
        losses = []
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with contextlib.nullcontext() if last else tz.accumulate(self.model, local=case.local):
                loss = loss_of(self.model, batch(self.steps_done, self.rank, micro))
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        self.tune(self.model, self.optimizer)
        return losses

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()
        self.steps_done += 1

    def look(self, trace: Trace) -> Trace:
        """Note this rank's parts of all states."""
        for piece in ModelState(self.model).pieces():
            if piece.kind.startswith("error_feedback"):
                continue
            if piece.kind == "weight":
                trace.weights.setdefault(piece.name, []).append((piece.start, piece.tensor.clone()))
            else:
                trace.states.setdefault((piece.name, piece.kind), []).append((piece.start, piece.tensor.clone()))
        return trace

    def run(self) -> tuple[list[Trace], dict[str, Tensor]]:
        """The traces of all steps, and the full compute weights at the end."""
        traces = [self.step() for _ in range(self.case.steps)]
        return traces, self.computed()

    def computed(self) -> dict[str, Tensor]:
        """The full weights that modules read, flat."""
        with tz.gathered(self.model) as parameters:
            names = [name for name, _ in self.model.named_parameters()]
            return {name: parameters[name].detach().flatten().clone() for name in names}


def gradients_of(model: nn.Module) -> dict[str, list[Fragment]]:
    """This rank's parts of the finished gradients, for parameters that have one."""
    grads: dict[str, list[Fragment]] = {}
    for bucket in engine_of(model).trainable():
        own = bucket.master.range
        for slot, seen in zip(bucket.slots, bucket.gradient.seen, strict=True):
            held = own.intersect(slot.range)
            if seen and bucket.gradient.finished.exists and held.numel:
                grads[slot.name] = [
                    (held.start - slot.offset, bucket.gradient.finished.read()[held.within(own)].clone())
                ]
    return grads


Ranks = list[tuple[list[Trace], dict[str, Tensor]]]


def run_on_threads(case: Case, **options: Any) -> Ranks:
    base_model(case.variant)  # built here: the threads would share one random generator
    return run_in_threads(case.ranks, lambda rank: Runner(case, rank, **options).run())


def check(case: Case) -> None:
    """Train the case on threads and compare every step with the reference."""
    assert_parity(case, run_on_threads(case), reference(case.recipe))


def assert_parity(case: Case, ranks: Ranks, expected: list[Step]) -> None:
    """Losses, gradients, master weights and optimizer states of every step, then the weights computed with."""
    for number, wanted in enumerate(expected):
        traces = [traces[number] for traces, _ in ranks]
        assert [trace.losses for trace in traces] == wanted.losses, f"losses of step {number}"
        for kind in ("grads", "weights", "states"):
            found = assemble([getattr(trace, kind) for trace in traces], f"{kind} of step {number}")
            assert_same_bits(found, getattr(wanted, kind), f"{kind} of step {number}")
    for _, parameters in ranks:
        assert_same_bits(parameters, computed_with(case, expected[-1]), "weights computed with")


def computed_with(case: Case, step: Step) -> dict[str, Tensor]:
    """The weights that modules read behind a step."""
    if case.recipe.gather:
        return step.computed
    return {name: weight.to(CASTS[case.precision][0]) for name, weight in step.weights.items()}


def assemble(parts: list[dict[Any, list[Fragment]]], what: str) -> dict[Any, Tensor]:
    """Whole flat tensors from the ranks' fragments; where replicas overlap they must hold the same bits."""
    whole: dict[Any, Tensor] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(parts)):
        fragments = sorted((fragment for part in parts for fragment in part.get(key, ())), key=operator.itemgetter(0))
        value, end = fragments[0][1].new_empty(max(start + tensor.numel() for start, tensor in fragments)), 0
        for start, tensor in fragments:  # all before `end` is there already
            assert start <= end, f"{what}: parts of {key} are on no rank"
            again = min(end, start + tensor.numel()) - start
            if again:
                same = torch.equal(bits(value[start : start + again]), bits(tensor[:again]))
                assert same, f"{what}: replicas differ in {key}"
            if again < tensor.numel():
                value[end : start + tensor.numel()] = tensor[again:]
                end = start + tensor.numel()
        whole[key] = value
    return whole


def assert_same_bits(found: dict[Any, Tensor], wanted: dict[Any, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), f"{what}: {sorted(map(str, found.keys() ^ wanted.keys()))} on one side only"
    for key, value in wanted.items():
        other = found[key]
        assert other.dtype == value.dtype, f"{what}: {key} is {other.dtype}, not {value.dtype}"
        if not torch.equal(bits(other), bits(value)):
            worst = (other.double() - value.double()).abs().max().item()
            different = int((bits(other) != bits(value)).sum())
            raise AssertionError(f"{what}: {key} differs in {different} of {value.numel()} elements, by up to {worst}")


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that -0 is not 0 and NaN is NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def with_feature(case: Case, feature: str) -> Case:
    """The case with one of `FEATURES` added."""
    return replace(case, **FEATURES[feature])


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"variant": "tied"},
    "frozen": {"variant": "frozen"},
    "unused": {"variant": "unused", "steps": 4},
    "unused_and_reordered": {"variant": "reordered", "micro_batches": 2, "steps": 4},
    "accumulating": {"micro_batches": 3},
    "accumulating_locally": {"micro_batches": 3, "local": True},
    "checkpointed": {"checkpointing": "full", "variant": "frozen"},
    "checkpointed_selectively": {"checkpointing": "selective", "variant": "tied"},
}
