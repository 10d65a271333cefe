"""A decoder with experts, trained on ranks that share them under every plan, against one process in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import LossScaling, checkpoint_activations, engine_of
from terrazzo.parallel import context_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import ExpertsConfig, routers_of
from tests.helpers.cover import places
from tests.helpers.threads import run_in_threads
from tests.parallel.test_training_in_parts import (
    GROUPED,
    ROWS,
    TOKENS,
    WHOLE,
    Part,
    batches,
    gradients_of,
    loss_of,
    optimizer_of,
)

EXPERTS = ExpertsConfig(count=8, top_k=2, ffn_dim=16, shared=1)
SIZES = DecoderConfig(61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=32, experts=EXPERTS)


@dataclass(frozen=True)
class Mesh:
    """`ranks`, of which neighbours share experts, some of these matrices too, or sequences."""

    plan: str
    ranks: int
    ep: int
    tp: int = 1
    cp: int = 1

    @property
    def readers(self) -> int:
        return self.ranks // (self.tp * self.cp)

    def __str__(self) -> str:
        return f"{self.plan}-{self.ranks}-ep{self.ep}-tp{self.tp}-cp{self.cp}"


@cache
def base() -> Decoder:
    """Scores lie far apart, so that in 16 bits few tokens are rounded into another expert's hands."""
    torch.manual_seed(1)
    model = Decoder(SIZES)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.6 if "router" in name else 0.1)
    return model


@cache
def plain() -> list[tuple[float, float, dict[str, Tensor], dict[str, Tensor]]]:
    """Of each step: the sum of losses, the gradients' norm, gradients of the mean by name, and weights after it."""
    model = copy.deepcopy(base())
    optimizer, found = optimizer_of(model), []
    for tokens, targets, _ in batches():
        total = loss_of(model(tokens), targets)
        (total / int((targets != -100).sum())).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append((float(total.detach()), norm, gradients, weights))
    return found


def trained(
    case: Mesh, checkpointing: str, precision: str, rank: int
) -> list[tuple[float, float, dict[str, Part], dict[str, Tensor]]]:
    """As `plain`, of this rank; of gradients the parts that it has."""
    model: Any = copy.deepcopy(base())
    checkpoint_activations(model, checkpointing, units=[Block])
    replicas = case.readers if case.tp * case.cp > 1 else 2
    mesh = tz.mesh(tp=case.tp, cp=case.cp, ep=case.ep, **({"dp_replicate": replicas} if case.plan in GROUPED else {}))
    context = context_of(tz.parallelize(model, mesh))
    dtypes = tz.Precision.named(precision)
    if dtypes.loss_scaling is not None:
        dtypes = replace(dtypes, loss_scaling=LossScaling(init=8.0))  # with which no step is skipped
    model, optimizer = tz.shard(model, optimizer_of(model), case.plan, units=[Block], precision=dtypes, mesh=mesh)
    found = []
    for tokens, targets, _ in batches():
        model.set_gradient_denominator(int((targets != -100).sum()))
        rows, total = list(range(rank // (case.tp * case.cp), ROWS, case.readers)), 0.0
        for row in rows:
            mine = tokens[row : row + 1], targets[row : row + 1], torch.arange(TOKENS).unsqueeze(0)
            mine = mine if context is None else context.split(*mine)  # type: ignore[assignment]
            with contextlib.nullcontext() if row == rows[-1] else tz.accumulate(model):
                loss = loss_of(model(mine[0], mine[2]), mine[1])
                loss.backward()
            total += float(loss.detach())
        norm, gradients = float(tz.clip_grad_norm_(model, float("inf"))), gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        full = {name: each.float() for name, each in tz.full_state_dict(model, keep=True).items()}
        found.append((total, norm, gradients, full))
    engine_of(model).close()
    return found


MESHES = [
    *(Mesh(plan, 2, 2) for plan in WHOLE),
    *(Mesh(plan, 4, ep) for plan in WHOLE for ep in (2, 4)),
    *(Mesh(plan, 4, 2) for plan in GROUPED),
    *(Mesh(plan, 4, ep, tp=2) for plan in WHOLE for ep in (2, 4)),
    *(Mesh(plan, 4, 4, cp=2) for plan in WHOLE),
    *(Mesh(plan, 8, 4, tp=2, cp=2) for plan in WHOLE),
    *(Mesh(plan, 8, 2, tp=2, cp=2) for plan in GROUPED),
]


def shape(mesh: Mesh) -> dict[str, object]:
    return {**places(mesh.plan), "ranks": mesh.ranks, "ep": mesh.ep, "tp": mesh.tp, "cp": mesh.cp}


@pytest.mark.cover(mesh=shape)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_with_shared_experts_is_training(mesh: Mesh, checkpointing: str, precision: str) -> None:
    relative = 2e-6 if precision == "fp32" else 3e-2
    expected = plain()  # first: the threads would share one random generator
    ranks = run_in_threads(mesh.ranks, lambda rank: trained(mesh, checkpointing, precision, rank))
    for step, (loss, norm, gradients, weights) in enumerate(expected):
        total = sum(each[step][0] for each in ranks) / mesh.tp  # whose ranks have lost the same
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


def test_what_experts_compute_is_counted_once_however_often_it_is_computed() -> None:
    """Under full checkpointing each forward runs twice; no row is lost."""
    start = base()

    def body(rank: int) -> list[int]:
        model: Any = copy.deepcopy(start)
        checkpoint_activations(model, "full", units=[Block])
        mesh = tz.mesh(ep=2)
        model, _ = tz.shard(tz.parallelize(model, mesh), None, "zero3", units=[Block], mesh=mesh)
        tokens, targets, _ = batches()[0]
        loss_of(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        return [int(router.load.sum()) for _, router in routers_of(model)]

    assert run_in_threads(2, body) == [[ROWS * TOKENS * EXPERTS.top_k] * SIZES.layers] * 2
