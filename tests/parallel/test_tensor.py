"""Tensor parallelism has the bits of one process that cuts matrices and adds partial sums in rank order."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, engine_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.helpers.threads import run_in_threads
from tests.parallel.oracle import ChunkedDecoder, add, cut_dim, finished, parts_of

RANKS, STEPS = 4, 2
_making = threading.Lock()


@dataclass(frozen=True)
class Case:
    plan: str = "zero3"
    tp: int = 2
    kv_heads: int = 2
    tied: bool = True
    sequence: bool = True
    micro_batches: int = 1
    checkpointing: str = "none"
    meta: bool = False
    muon: bool = False

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(31, 16, 2, 4, self.kv_heads, 26, 8, tie_embeddings=self.tied)

    @property
    def data_ranks(self) -> int:
        return RANKS // self.tp


@functools.cache
def whole(config: DecoderConfig) -> Decoder:
    with _making:
        torch.manual_seed(0)
        return Decoder(config)


def tokens(step: int, data_rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * data_rank + micro)
    return torch.randint(31, (2, 8), generator=generator)


def loss_of(model, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


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


def train(case: Case, rank: int):
    groups = 2 if case.plan.startswith(("h", "hybrid")) else None
    mesh = tz.mesh(tp=case.tp, dp_replicate=groups, device="cpu")
    model = copy.deepcopy(whole(case.config))
    checkpoint_activations(model, case.checkpointing, units=[Block])
    tz.parallelize(model, mesh, sequence=case.sequence)
    sgd = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    made = muon_of(model) if case.muon else lambda parameters: sgd(parameters)
    model, optimizer = tz.shard(model, made, case.plan, mesh=mesh, units=[Block])
    trace = []
    for step in range(STEPS):
        losses = []
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with contextlib.nullcontext() if last else tz.accumulate(model, local=True):
                loss = loss_of(model, tokens(step, rank // case.tp, micro))
                loss.backward()
            losses.append(loss.item())
        grads = own_parts(model, lambda bucket: bucket.gradient.finished.read())
        norm = tz.clip_grad_norm_(model, float("inf")).item()
        if step == 0:  # other measures are of the whole parameters, too
            squares = [parameter.grad.double().square().sum().item() for parameter in model.parameters()]
            assert math.sqrt(sum(squares)) == pytest.approx(norm, rel=1e-5)
        sent = engine_of(model).traffic.bytes["all_to_all"]
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).settle()
        sent = engine_of(model).traffic.bytes["all_to_all"] - sent
        assert sent == engine_of(model).promise.traffic().bytes["all_to_all"]
        assert bool(sent) is case.muon
        trace.append((losses, grads, norm, own_parts(model, masters)))
    return trace


def muon_of(model) -> tz.optim.Muon:
    return tz.optim.Muon(*tz.optim.hidden_matrices(model), lr=0.02, adamw={"lr": 0.01, "fused": True})


class WholeMatrices:
    """torch's Muon over whole matrices, of which ranks have parts, and AdamW over the parts of all else."""

    def __init__(self, weights: dict[str, list[Tensor]], config: DecoderConfig, tp: int) -> None:
        self.weights, self.cut = weights, functools.partial(parts_of, config=config, tp=tp)
        self.join = functools.partial(_joined, config=config, tp=tp)
        of_blocks = {name: parts for name, parts in weights.items() if name.startswith("blocks") and parts[0].ndim == 2}
        self.matrices = {name: torch.nn.Parameter(self.join(name, parts)) for name, parts in of_blocks.items()}
        others = [part for name, parts in weights.items() if name not in of_blocks for part in parts]
        self.muon = torch.optim.Muon([*self.matrices.values()], lr=0.02)
        self.adamw = torch.optim.AdamW(others, lr=0.01, fused=True)

    def step(self) -> None:
        for name, matrix in self.matrices.items():
            matrix.grad = self.join(name, [part.grad for part in self.weights[name]])
        self.muon.step()
        self.adamw.step()
        for name, matrix in self.matrices.items():
            for part, values in zip(self.weights[name], self.cut(name, matrix.detach()), strict=True):
                part.copy_(values)


def reference(case: Case):
    """The same in one process, with a stock optimizer over each rank's parts."""
    config, tp = case.config, case.tp
    model = copy.deepcopy(whole(config))
    weights = {name: parts_of(name, each.detach(), config, tp) for name, each in model.named_parameters()}
    sgd = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    whole_matrices = functools.partial(WholeMatrices, weights, config, tp)
    optimizer = whole_matrices() if case.muon else sgd([part for parts in weights.values() for part in parts])
    trace = []
    for step in range(STEPS):
        joined = {name: _joined(name, parts, config, tp) for name, parts in weights.items()}
        oracle = ChunkedDecoder(joined, config, tp, case.sequence)
        runs = [
            [oracle.gradients(tokens(step, rank, micro)) for rank in range(case.data_ranks)]
            for micro in range(case.micro_batches)
        ]
        grads = finished([[found for _, found in micro] for micro in runs], config, tp, case.sequence)
        for name, parts in weights.items():
            for part, grad in zip(parts, grads[name], strict=True):
                part.grad = grad
        squares = [_joined(name, parts, config, tp).double().square().sum() for name, parts in grads.items()]
        optimizer.step()
        losses = [[micro[rank][0] for micro in runs] for rank in range(case.data_ranks)]
        copied = {name: [part.clone() for part in parts] for name, parts in weights.items()}
        trace.append((losses, grads, add(squares).sqrt().item(), copied))
    return trace


def _joined(name: str, parts: list[Tensor], config: DecoderConfig, tp: int) -> Tensor:
    dim = cut_dim(name, config, tp)
    return parts[0] if dim is None else torch.cat(parts, dim)


def check(case: Case) -> None:
    whole(case.config)
    ranks, expected = run_in_threads(RANKS, functools.partial(train, case)), reference(case)
    for step, (losses, grads, norm, weights) in enumerate(expected):
        for rank, trace in enumerate(ranks):
            own_losses, own_grads, own_norm, own_weights = trace[step]
            assert own_losses == losses[rank // case.tp]
            assert own_norm == pytest.approx(norm, rel=1e-6)
            for kind, own, wanted in (("gradient", own_grads, grads), ("weight", own_weights, weights)):
                for name, (start, part) in own.items():
                    theirs = wanted[name][rank % case.tp].flatten()[start : start + part.numel()]
                    assert torch.equal(part, theirs), f"{kind} of {name}, step {step}, rank {rank}"
        held = {name for trace in ranks for name in trace[step][1]}
        assert held == grads.keys()


@pytest.mark.parametrize(
    "case",
    [
        Case("zero3"),
        pytest.param(Case("zero0", tied=False, checkpointing="full"), marks=pytest.mark.long),
        Case("zero1", kv_heads=1, sequence=False),
        Case("zero2@cpu", tp=4, kv_heads=2),
        pytest.param(Case("zero3@cpu-all", tp=4, kv_heads=4, tied=False, sequence=False), marks=pytest.mark.long),
        pytest.param(Case("shard_grad_op", kv_heads=1, micro_batches=2, checkpointing="full"), marks=pytest.mark.long),
        pytest.param(Case("hybrid_shard", tied=False, micro_batches=2), marks=pytest.mark.long),
        Case("hpz", kv_heads=4, sequence=False, checkpointing="full"),
        Case("zero3", kv_heads=1, muon=True),
        pytest.param(Case("zero0", tp=4, kv_heads=4, muon=True), marks=pytest.mark.long),
        pytest.param(Case("hybrid_shard", tied=False, muon=True), marks=pytest.mark.long),
    ],
    ids=lambda case: f"{case.plan}-tp{case.tp}{'-muon' * case.muon}",
)
def test_every_rank_has_the_bits_of_one_process(case: Case) -> None:
    check(case)
