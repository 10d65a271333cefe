"""A decoder with experts, trained on ranks that share them under every plan, against one process in plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.engine import checkpoint_activations
from terrazzo.parallel import context_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig, auxiliary_loss, routers_of
from tests.helpers.cover import places
from tests.helpers.threads import run_in_threads
from tests.parallel.test_training_in_parts import (
    GROUPED,
    ROWS,
    TOKENS,
    WHOLE,
    Step,
    batches,
    loss_of,
    never_skipping,
    optimizer_of,
    plain_step,
    steps_in_parts,
)

EXPERTS = MixtureConfig(count=8, top_k=2, ffn_dim=16, shared=1, z_loss=0.01)
SIZES = DecoderConfig(61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=32, experts=EXPERTS)


@dataclass(frozen=True)
class Mesh:
    """`ranks`, of which neighbours share experts, some of these matrices too, or sequences; and halves the layers."""

    plan: str
    ranks: int
    ep: int
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def readers(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    def __str__(self) -> str:
        return f"{self.plan}-{self.ranks}-ep{self.ep}-tp{self.tp}-cp{self.cp}" + f"-pp{self.pp}" * (self.pp > 1)


@cache
def base(tied: bool) -> Decoder:
    """Scores lie far apart, so that in 16 bits few tokens are rounded into another expert's hands."""
    torch.manual_seed(1)
    model = Decoder(replace(SIZES, tie_embeddings=tied))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.6 if "router" in name else 0.1)
    return model


@cache
def plain(tied: bool) -> list[Step]:
    model = copy.deepcopy(base(tied))
    optimizer, found = optimizer_of(model), []
    for tokens, targets, _ in batches():
        total = loss_of(model(tokens), targets)
        aside = auxiliary_loss(model)
        assert aside is not None
        found.append(plain_step(model, optimizer, total, targets, aside))
    return found


def trained(case: Mesh, checkpointing: str, precision: str, rank: int, chunks: int = 1) -> list[Step]:
    model: Any = copy.deepcopy(base(case.pp == 1))
    checkpoint_activations(model, checkpointing, units=[Block])
    replicas = case.readers if case.tp * case.cp > 1 else 2
    axes = {"pp": case.pp} if case.pp > 1 else {}
    axes |= {"dp_replicate": replicas} if case.plan in GROUPED else {}
    mesh = tz.mesh(tp=case.tp, cp=case.cp, ep=case.ep, **axes)
    context = context_of(tz.parallelize(model, mesh, pipeline=tz.Pipeline(chunks=chunks) if case.pp > 1 else None))
    dtypes = never_skipping(precision)
    model, optimizer = tz.shard(model, optimizer_of(model), case.plan, units=[Block], precision=dtypes, mesh=mesh)
    rows = range(rank // (case.tp * case.cp) % case.readers, ROWS, case.readers)
    return steps_in_parts(model, optimizer, context, rows, documents=False)


def turned(plans: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Of equals a cover chooses the first."""
    return plans[by:] + plans[:by]


MESHES = [
    *(Mesh(plan, 2, 2) for plan in turned(WHOLE, 1)),
    *(Mesh(plan, 4, ep) for plan in turned(WHOLE, 2) for ep in (2, 4)),
    *(Mesh(plan, 4, 2) for plan in GROUPED),
    *(Mesh(plan, 4, ep, tp=2) for plan in turned(WHOLE, 6) for ep in (2, 4)),
    *(Mesh(plan, 4, 4, cp=2) for plan in turned(WHOLE, 5)),
    *(pytest.param(Mesh(plan, 8, 4, tp=2, cp=2), marks=pytest.mark.long) for plan in turned(WHOLE, 4)),
    *(pytest.param(Mesh(plan, 8, 2, tp=2, cp=2), marks=pytest.mark.long) for plan in turned(GROUPED, 2)),
]
"""Eight ranks, which share all at once: test_six_axes."""


def shape(mesh: Mesh) -> dict[str, object]:
    return {**places(mesh.plan), "ranks": mesh.ranks, "ep": mesh.ep, "tp": mesh.tp, "cp": mesh.cp}


def kind(mesh: Mesh) -> dict[str, object]:
    """Of plans whether weights are split, and how; where all of their states lie meets every axis in stages, below."""
    return {"weight": str(places(mesh.plan)["weight"])[0], "ep": mesh.ep, "tp": mesh.tp, "cp": mesh.cp}


@pytest.mark.cover(mesh=kind, strength=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_with_shared_experts_is_training(mesh: Mesh, checkpointing: str, precision: str) -> None:
    plain(tied=True)  # first: the threads would share one random generator
    compare(mesh, precision, run_in_threads(mesh.ranks, lambda rank: trained(mesh, checkpointing, precision, rank)))


def compare(mesh: Mesh, precision: str, ranks: list[Any]) -> None:
    """What each rank has `trained`, with one process of plain PyTorch."""
    relative = 2e-6 if precision == "fp32" else 3e-2
    for step, (loss, norm, gradients, weights) in enumerate(plain(mesh.pp == 1)):
        total = sum(each[step][0] for each in ranks) / (mesh.tp * mesh.pp)  # whose ranks have lost the same
        assert total == pytest.approx(loss, rel=relative)
        seen: dict[str, int] = {}
        for _, its_norm, parts, its_weights in (each[step] for each in ranks):
            assert its_norm == pytest.approx(norm, rel=relative * 5)
            for name, (box, start, part) in parts.items():
                whole = gradients[name]
                wanted = box.of(whole).flatten()[start : start + part.numel()]
                off = part.float() - wanted
                worst = off.abs().max() / whole.abs().max() if precision == "fp32" else off.norm() / whole.norm()
                assert worst < relative * (5 if precision == "fp32" else 10), (name, step)
                seen[name] = seen.get(name, 0) + part.numel()
            for name, weight in weights.items():
                assert (its_weights[name] - weight).abs().max() < relative * weight.abs().max(), (name, step)
        assert all(seen[name] >= whole.numel() for name, whole in gradients.items())


STAGED = [
    *(Mesh(plan, 4, 2, pp=2) for plan in WHOLE),
    *(
        pytest.param(Mesh(plan, 8, ep, tp=tp, cp=3 - tp, pp=2), marks=pytest.mark.long)
        for plan in WHOLE
        for tp in (2, 1)
        for ep in (2, 4)
    ),
    *(pytest.param(Mesh(plan, 8, 2, tp=2, pp=2), marks=pytest.mark.long) for plan in GROUPED),
]


@pytest.mark.cover(mesh=shape, strength=1, turns=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("mesh", STAGED, ids=str)
def test_so_it_is_in_stages(mesh: Mesh, chunks: int, checkpointing: str, precision: str) -> None:
    """Some have no experts. What routers put aside is learnt on the ranks of their stage."""
    plain(tied=False)
    ranks = run_in_threads(mesh.ranks, lambda rank: trained(mesh, checkpointing, precision, rank, chunks))
    compare(mesh, precision, ranks)


def test_what_experts_compute_is_counted_once_however_often_it_is_computed() -> None:
    """Under full checkpointing each forward runs twice; no row is lost."""
    start = base(tied=True)

    def body(rank: int) -> list[int]:
        model: Any = copy.deepcopy(start)
        checkpoint_activations(model, "full", units=[Block])
        mesh = tz.mesh(ep=2)
        model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero3", units=[Block], mesh=mesh)
        tokens, targets, _ = batches()[0]
        loss_of(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        return [int(router.load.sum()) for _, router in routers_of(model)]

    assert run_in_threads(2, body) == [[ROWS * TOKENS * EXPERTS.top_k] * SIZES.layers] * 2


def test_sums_of_micro_batches_meet_in_one_dtype_on_every_tier() -> None:
    """Experts of which each rank has others are summed over no rank: what micro-batches add up is never in `reduce`."""

    def weights(plan: str, rank: int) -> dict[str, torch.Tensor]:
        model: Any = copy.deepcopy(base(False))
        mesh = tz.mesh(ep=2)
        tz.parallelize(model, mesh)
        precision = replace(tz.Precision.named("bf16"), reduce=torch.bfloat16)
        model, optimizer = tz.shard(
            model, torch.optim.SGD(model.parameters(), lr=1.0), plan, units=[Block], precision=precision, mesh=mesh
        )
        steps = steps_in_parts(model, optimizer, None, range(rank, ROWS, 2), documents=False)
        return steps[-1][3]

    def body(rank: int) -> None:
        on_device, on_host = weights("zero3", rank), weights("zero3@cpu-all", rank)
        assert {name for name, each in on_device.items() if not torch.equal(each, on_host[name])} == set()

    run_in_threads(2, body)
