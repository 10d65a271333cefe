"""A model in stages has the bits of one process that runs micro-batch after micro-batch."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, engine_of, estimate
from terrazzo.engine.offload.activations import offloaded_activations
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.helpers.cover import mostly_long, places
from tests.helpers.threads import run_in_threads

STEPS = 2
_making = threading.Lock()


@dataclass(frozen=True)
class Case:
    plan: str = "zero3"
    pp: int = 2
    ranks: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 4
    checkpointing: str = "none"
    precision: str = "fp32"
    frozen: tuple[str, ...] = ()
    checkpoints_last: bool = False
    update: Literal["overlapped", "synchronous", "backward"] = "overlapped"
    offloads_activations: bool = False
    attaches: bool = False
    tied: bool = False

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(31, 16, 6, 4, 2, 26, 8, tie_embeddings=self.tied)

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.pp

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values() if value not in ((), False, "overlapped"))


@functools.cache
def whole(config: DecoderConfig) -> Decoder:
    with _making:
        torch.manual_seed(0)
        return Decoder(config)


def micro_batch(step: int, data_rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * data_rank + micro)
    tokens = torch.randint(31, (2, 7 + micro % 2), generator=generator)  # shapes differ within a step
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def own_parts(model, values) -> dict[str, tuple[int, Tensor]]:
    """By parameter, where this rank's run of its flattened part begins, and its elements."""
    found = {}
    for bucket in engine_of(model).trainable():
        held, flat = bucket.master.range, values(bucket)
        for slot in bucket.slots:
            if (part := held.intersect(slot.range)).numel:
                found[slot.name] = part.start - slot.offset, flat[part.within(held)].clone()
    return found


def masters(bucket) -> Tensor:
    return bucket.master.copied(bucket.master.range, torch.device("cpu"))


def precision_of(case: Case) -> tz.Precision:
    """Losses are sums, whose gradients the usual first scale would take out of the range of fp16."""
    named = tz.Precision.named(case.precision)
    return replace(named, loss_scaling=tz.LossScaling(init=256.0)) if case.precision == "fp16" else named


def model_of(case: Case) -> Decoder:
    model = copy.deepcopy(whole(case.config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen))
    return model


def made(case: Case, folder: str | None = None):
    groups = 2 if case.plan.startswith(("h", "hybrid")) else None
    mesh = tz.mesh(pp=case.pp, dp_replicate=groups, device="cpu")
    model = model_of(case)
    first, second = ("none", case.checkpointing) if case.checkpoints_last else (case.checkpointing, "none")
    offloads = case.offloads_activations
    checkpoint_activations(model, first, units=[Block], offload=offloads and not case.checkpoints_last)
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(case.schedule, case.chunks))
    checkpoint_activations(model, second, units=[Block], offload=offloads and case.checkpoints_last)
    sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    nvme = "nvme" in case.plan
    offload = tz.Offload(path=folder if nvme else None, direct=not nvme, step=case.update)
    shard = functools.partial(tz.shard, mesh=mesh, units=[Block], precision=precision_of(case), offload=offload)
    if not case.attaches:
        return shard(model, sgd, case.plan)
    model, _ = shard(model, None, case.plan)
    return model, tz.attach(model, sgd(model.parameters()))


def train(case: Case, folder: str | None, rank: int):
    model, optimizer = made(case, folder)
    data_rank, trace = rank % case.data_ranks, []
    for step in range(STEPS):
        batches = [micro_batch(step, data_rank, micro) for micro in range(case.micro_batches)]
        loss = tz.step(model, batches, loss_of, denominator=10.0).item()
        grads = own_parts(model, lambda bucket: bucket.gradient.finished.read())
        norm = tz.clip_grad_norm_(model, float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).settle()
        trace.append((loss, grads, norm, own_parts(model, masters)))
    with torch.no_grad():
        evaluated = tz.step(model, batches, loss_of).item()
    return trace, evaluated, engine_of(model).traffic.count["all_gather"]


def reference(case: Case):
    """The same in one process: micro-batch after micro-batch of each data rank, whose gradients are then added."""
    model = model_of(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    trace = []
    for step in range(STEPS):
        losses, sums = [], []
        for data_rank in range(case.data_ranks):
            total = torch.zeros(())
            for micro in range(case.micro_batches):
                inputs, targets = micro_batch(step, data_rank, micro)
                loss = loss_of(model(inputs), targets)
                loss.backward()
                total += loss.detach()
            losses.append(total.item())
            sums.append([each.grad for _, each in trained])
            model.zero_grad()
        for (_, each), parts in zip(trained, zip(*sums, strict=True), strict=True):
            each.grad = added(parts, case) / 10.0
        grads = {name: each.grad.clone() for name, each in trained}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: each.detach().clone() for name, each in trained}
        trace.append((losses, grads, norm, weights))
    with torch.no_grad():
        evaluated = []
        for data_rank in range(case.data_ranks):
            batches = [micro_batch(step, data_rank, micro) for micro in range(case.micro_batches)]
            evaluated.append(sum(loss_of(model(inputs), targets) for inputs, targets in batches).item())
    return trace, evaluated


def added(parts: tuple[Tensor, ...], case: Case) -> Tensor:
    """In rank order along the inner axis, then along the outer one."""
    inner = 2 if case.plan.startswith("h") else len(parts)
    groups = [functools.reduce(torch.add, parts[i : i + inner]) for i in range(0, len(parts), inner)]
    return functools.reduce(torch.add, groups)


def check(case: Case, folder: str | None = None) -> None:
    whole(case.config)
    ranks = run_in_threads(case.ranks, functools.partial(train, case, folder))
    expected, evaluated = reference(case)
    for step, (losses, grads, norm, weights) in enumerate(expected):
        assert set().union(*(trace[step][1] for trace, *_ in ranks)) == set(weights)
        for rank, (trace, *_) in enumerate(ranks):
            loss, own_grads, own_norm, own_weights = trace[step]
            assert loss == losses[rank % case.data_ranks]
            assert own_norm == pytest.approx(norm, rel=1e-6)
            assert_equal(own_grads, grads)
            assert_equal(own_weights, weights)
    assert [found for _, found, _ in ranks] == [evaluated[rank % case.data_ranks] for rank in range(case.ranks)]


def test_a_model_in_stages_is_freed_at_once() -> None:
    """Ranks collect no garbage."""
    case = Case(plan="zero1", ranks=2, micro_batches=2, checkpointing="full")
    whole(case.config)

    def body(rank: int) -> None:
        model, optimizer = made(case)
        tz.step(model, [micro_batch(0, 0, micro) for micro in range(2)], loss_of)
        gone = [weakref.ref(model), weakref.ref(engine_of(model)), weakref.ref(model.blocks[rank])]
        del model, optimizer
        assert [each() for each in gone] == [None] * 3

    run_in_threads(2, body)


def assert_equal(parts: dict[str, tuple[int, Tensor]], wholes: dict[str, Tensor]) -> None:
    for name, (start, values) in parts.items():
        assert torch.equal(values, wholes[name].flatten()[start : start + len(values)]), name


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("zero0"), marks=pytest.mark.long),
        pytest.param(Case("zero3"), marks=pytest.mark.long),
        pytest.param(Case("zero2", schedule="gpipe"), marks=pytest.mark.long),
        pytest.param(Case("shard_grad_op", micro_batches=5), marks=pytest.mark.long),
        pytest.param(Case("zero3", chunks=2), marks=pytest.mark.long),
        pytest.param(Case("zero1", pp=4, micro_batches=6), marks=pytest.mark.long),  # tied: test_pipeline_tied
        pytest.param(Case("hybrid_shard", ranks=8), marks=pytest.mark.long),
        pytest.param(Case("hpz", ranks=8), marks=pytest.mark.long),
        Case("hpz", ranks=8, micro_batches=2),
        pytest.param(Case("zero3", pp=4, ranks=4, checkpointing="full"), marks=pytest.mark.long),
        Case("zero3", chunks=2, checkpointing="full", checkpoints_last=True),
        pytest.param(Case("shard_grad_op", frozen=("embedding", "head")), marks=pytest.mark.long),
        pytest.param(Case("zero2", chunks=2, frozen=("blocks.1.", "blocks.4.attention")), marks=pytest.mark.long),
        pytest.param(Case("zero0", schedule="zero_bubble"), marks=pytest.mark.long),
        Case("zero3", schedule="zero_bubble", pp=4, micro_batches=7),
        pytest.param(
            Case("hybrid_shard", schedule="zero_bubble", ranks=8, checkpointing="full"), marks=pytest.mark.long
        ),
        Case("shard_grad_op", schedule="zero_bubble", frozen=("blocks.1.", "blocks.4.attention")),
    ],
    ids=str,
)
def test_equals_sequential_accumulation(case):
    check(case)


def test_an_estimate_of_a_model_in_stages_is_its_bill():
    def body(rank: int):
        mesh, model = tz.mesh(pp=2, device="cpu"), model_of(Case("zero3"))
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        told = estimate(model, torch.optim.AdamW, "zero3", mesh=mesh, units=[Block])
        model, _ = tz.shard(model, torch.optim.AdamW, "zero3", mesh=mesh, units=[Block])
        promise = engine_of(model).promise
        assert promise.traffic().bytes == promise.traffic(micro_batches=2).bytes
        return told, engine_of(model).bill

    for told, bill in run_in_threads(4, body):
        assert told == bill
        assert told.transient_bytes > 0


def promised_and_measured(case: Case, rank: int):
    """Of a step: what is sent by kind, as counts and bytes, and the most held at once.

    Of messages their number, without those of activations and of their gradients: one for each micro-batch, from each
    chunk to the next and back.
    """
    model, optimizer = made(case)
    engine, batches = engine_of(model), [micro_batch(0, 0, micro) for micro in range(case.micro_batches)]
    for _ in range(2):
        engine.traffic.reset()
        tz.step(model, batches, loss_of)
        optimizer.step()
        optimizer.zero_grad()
    stage = rank // case.data_ranks
    activations = case.micro_batches * (2 * case.chunks - (stage == 0) - (stage == case.pp - 1))
    told, found = (
        {kind: (each.count[kind], sent) for kind, sent in each.bytes.items() if kind not in ("control", "send")}
        | {"messages": each.count["send"] - sent_on}
        for each, sent_on in ((engine.promise.traffic(case.micro_batches), 0), (engine.traffic, activations))
    )
    return (told, engine.promise.memory(case.micro_batches).transient_bytes), (found, engine.peak_transient_bytes)


PLANS = ["zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid_shard", "hpz", "zero3@cpu", "zero3@cpu-all"]
MET_BELOW = ("zero1", "zero2", "zero3@cpu")  # with more than stages alone
ELSEWHERE = ("zero0", "hybrid_shard")  # beside tp and ep, in test_bill


@pytest.mark.cover(strength=1, turns=2, case=lambda case: {**vars(case), "plan": 0, **places(case.plan)})
@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(
                Case(plan, chunks=chunks),
                marks=[pytest.mark.long] if (number + chunks) % 2 or plan in MET_BELOW + ELSEWHERE else [],
            )
            for number, plan in enumerate(PLANS)
            for chunks in (1, 2)
        ),
        Case("zero3", precision="fp16", pp=4, micro_batches=6),
        Case("zero2", schedule="gpipe", checkpointing="full"),
        pytest.param(Case("zero3", schedule="zero_bubble"), marks=pytest.mark.long),
        Case("zero1", schedule="zero_bubble", pp=4, micro_batches=6, tied=True),
        pytest.param(Case("zero3", tied=True), marks=pytest.mark.long),  # so is the bill in test_pipeline_tied
        Case("zero2@cpu", chunks=2, tied=True),
        Case("zero1", tied=True, frozen=("embedding",)),
    ],
    ids=str,
)
def test_memory_and_traffic_are_as_promised(case):
    case = replace(case, ranks=8 if case.plan.startswith("h") else 4)
    for promised, measured in run_in_threads(case.ranks, functools.partial(promised_and_measured, case)):
        assert promised == measured


@pytest.mark.parametrize("plan", mostly_long(["zero2@cpu", "zero3@cpu-all", "zero3@nvme-all"], "zero3@nvme-all"))
def test_states_of_stages_may_lie_off_the_device(plan, tmp_path):
    check(Case(plan, chunks=2 if plan == "zero2@cpu" else 1), str(tmp_path))


@pytest.mark.parametrize("chunks", mostly_long([1, 2], 2))
def test_stages_may_be_updated_as_their_sums_end(chunks):
    check(Case("zero2@cpu", chunks=chunks, update="backward"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("zero3", checkpointing="full", offloads_activations=True), marks=pytest.mark.long),
        pytest.param(
            Case("shard_grad_op", chunks=2, checkpointing="selective", offloads_activations=True),
            marks=pytest.mark.long,
        ),
        Case("zero2", schedule="gpipe", checkpointing="full", checkpoints_last=True, offloads_activations=True),
    ],
    ids=str,
)
def test_stages_may_keep_what_units_are_given_in_the_hosts_memory(case, monkeypatch):
    monkeypatch.setattr(offloaded_activations, "SMALLEST_BYTES", 1)
    moved, move = [], offloaded_activations.OffloadedActivations._move
    monkeypatch.setattr(
        offloaded_activations.OffloadedActivations,
        "_move",
        lambda own, tensor: moved.append(tensor.shape) or move(own, tensor),
    )
    check(case)
    assert len(moved) >= case.ranks * STEPS * case.micro_batches


ATTACHED = [Case("zero3", attaches=True), Case("zero2@cpu", chunks=2, attaches=True)]


@pytest.mark.parametrize(
    "case",
    mostly_long(ATTACHED, ATTACHED[1]),
    ids=str,
)
def test_an_optimizer_that_is_attached_to_stages(case):
    check(case)


def test_an_average_of_stages_is_that_of_the_model():
    case, decay = Case("zero3"), 0.5

    def body(rank: int):
        model, optimizer = made(case)
        average = tz.EMA(model, decay)
        for step in range(STEPS):
            batches = [micro_batch(step, rank % case.data_ranks, micro) for micro in range(case.micro_batches)]
            tz.step(model, batches, loss_of, denominator=10.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        with average.swapped():
            return own_parts(model, masters)

    whole(case.config)
    held = run_in_threads(case.ranks, body)
    averages = {name: each.detach().clone() for name, each in whole(case.config).named_parameters()}
    for *_, weights in reference(case)[0]:
        averages = {name: each.lerp(weights[name], 1 - decay) for name, each in averages.items()}
    assert set().union(*held) == set(averages)
    for parts in held:
        assert_equal(parts, averages)


def test_averages_of_stages_that_have_come_apart():
    case = Case("zero3", ranks=2)

    def body(rank: int) -> None:
        model, _ = made(case)
        tz.EMA(model, 0.5 + 0.1 * rank)

    whole(case.config)
    with pytest.raises(tz.BadInput, match="decay"):
        run_in_threads(2, body)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("zero3", precision="fp16"), marks=pytest.mark.long),
        pytest.param(Case("zero2", precision="bf16", chunks=2), marks=pytest.mark.long),
        pytest.param(Case("zero2", precision="bf16", schedule="zero_bubble"), marks=pytest.mark.long),
        Case("zero3", precision="fp16", schedule="zero_bubble"),
    ],
    ids=str,
)
def test_sixteen_bits_are_near_to_thirty_two(case):
    """A loss scale that is missing, or there twice, would be off by a factor of thousands."""
    ranks = run_in_threads(case.ranks, functools.partial(train, case, None))
    losses, grads, norm, _ = reference(case)[0][0]
    for rank, (trace, *_) in enumerate(ranks):
        loss, own_grads, own_norm, _ = trace[0]
        assert loss == pytest.approx(losses[rank % case.data_ranks], rel=1e-2)
        assert own_norm == pytest.approx(norm, rel=1e-2)
        for name, (start, values) in own_grads.items():
            expected = grads[name].flatten()[start : start + len(values)]
            assert (values - expected).norm() <= 0.03 * expected.norm() + 1e-4, name


def test_an_overflow_in_one_stage_skips_the_step_in_all():
    case = Case("zero2", ranks=2, precision="fp16")

    def body(rank: int) -> tuple[bool, float]:
        mesh = tz.mesh(pp=2, device="cpu")
        model = copy.deepcopy(whole(case.config))
        tz.parallelize(model, mesh, pipeline=tz.Pipeline())
        sgd = functools.partial(torch.optim.SGD, lr=0.01)
        model, optimizer = tz.shard(model, sgd, case.plan, mesh=mesh, units=[Block], precision="fp16")
        before = own_parts(model, masters)
        tz.step(model, [micro_batch(0, 0, micro) for micro in range(2)], loss_of, denominator=10.0)
        if rank == 1:
            gradient = engine_of(model).trainable()[-1].gradient.finished
            gradient.change(0, lambda part: part.fill_(float("inf")))
        engine_of(model).traffic.reset()
        optimizer.step()
        told, found = engine_of(model).promise.traffic(2), engine_of(model).traffic
        assert told.count["control"] == found.count["control"] == 1, "the flag, along the axis of stages"
        assert told.bytes["control"] == found.bytes["control"]
        engine_of(model).settle()
        after = own_parts(model, masters)
        return all(torch.equal(after[name][1], before[name][1]) for name in before), optimizer.scaler_state()["scale"]

    whole(case.config)
    (first, *scales), (second, *other) = run_in_threads(2, body)
    assert first and second and scales == other
