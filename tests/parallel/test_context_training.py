"""The decoder trained in parts under every plan, against one process in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import checkpoint_activations, engine_of
from terrazzo.parallel import context_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.engine.parity import gradients_of
from tests.helpers.cover import places
from tests.helpers.threads import run_in_threads

SIZES = DecoderConfig(61, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=32)
ROWS, TOKENS, STEPS = 4, 32, 2
CP = 2


@dataclass(frozen=True)
class Case:
    """A run on `ranks`, of which neighbours share sequences."""

    plan: str
    ranks: int
    mode: str
    documents: bool
    checkpointing: str
    precision: str


@cache
def base() -> Decoder:
    torch.manual_seed(1)
    model = Decoder(SIZES)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model


@cache
def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets one ahead of which some are ignored, and positions of documents."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(61, (ROWS, TOKENS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, ::7] = -100
        cut = torch.cat((torch.arange(11), torch.arange(TOKENS - 11)))
        other = torch.cat((torch.arange(25), torch.arange(TOKENS - 25)))
        positions = torch.stack([cut, torch.arange(TOKENS), other, torch.arange(TOKENS)])
        found.append((tokens[:, :-1], targets, positions))
    return found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are as exact as the gradients; AdamW's first is the sign of each, be it ever so small."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@cache
def plain(documents: bool) -> list[tuple[float, float, dict[str, Tensor], dict[str, Tensor]]]:
    """Of each step: the sum of losses, the gradients' norm, gradients of the mean by name, and weights after it.

    Each document is a sequence of its own.
    """
    model = copy.deepcopy(base())
    optimizer, found = optimizer_of(model), []
    for tokens, targets, positions in batches():
        total = torch.zeros(())
        for row in range(ROWS):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), TOKENS] if documents else [0, TOKENS]
            for start, stop in itertools.pairwise(starts):
                piece = slice(start, stop)
                total = total + loss_of(model(tokens[row : row + 1, piece]), targets[row : row + 1, piece])
        (total / int((targets != -100).sum())).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append((float(total.detach()), norm, gradients, weights))
    return found


def trained(case: Case, rank: int) -> list[tuple[float, float, dict[str, Any], dict[str, Tensor]]]:
    """As `plain`, of this rank; of gradients the parts that it has."""
    model: Any = copy.deepcopy(base())
    checkpoint_activations(model, case.checkpointing, units=[Block])
    grouped = case.plan in GROUPED
    mesh = tz.mesh(cp=CP, **({"dp_replicate": case.ranks // CP} if grouped else {}))
    context = context_of(tz.parallelize(model, mesh, context=case.mode))  # type: ignore[arg-type]
    assert context is not None
    model, optimizer = tz.shard(
        model, optimizer_of(model), case.plan, units=[Block], precision=case.precision, mesh=mesh
    )
    readers, found = case.ranks // CP, []
    for tokens, targets, positions in batches():
        if not case.documents:
            positions = torch.arange(TOKENS).expand(ROWS, -1)
        model.set_gradient_denominator(int((targets != -100).sum()))
        rows, total = list(range(rank // CP, ROWS, readers)), 0.0
        for row in rows:
            mine = context.split(tokens[row : row + 1], targets[row : row + 1], positions[row : row + 1])
            with contextlib.nullcontext() if row == rows[-1] else tz.accumulate(model):
                loss = loss_of(model(mine[0], mine[2]), mine[1])
                loss.backward()
            total += float(loss.detach())
        norm, gradients = float(tz.clip_grad_norm_(model, float("inf"))), gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        with tz.gathered(model) as parameters:
            weights = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
        found.append((total, norm, gradients, weights))
    engine_of(model).close()
    return found


def check(case: Case) -> None:
    relative = 2e-6 if case.precision == "fp32" else 3e-2
    expected_steps = plain(case.documents)  # first: the threads would share one random generator
    ranks = run_in_threads(case.ranks, lambda rank: trained(case, rank))
    for step, (loss, norm, gradients, weights) in enumerate(expected_steps):
        assert sum(each[step][0] for each in ranks) == pytest.approx(loss, rel=relative)
        for _, its_norm, parts, its_weights in (each[step] for each in ranks):
            assert its_norm == pytest.approx(norm, rel=relative * 5)
            for name, whole in gradients.items():  # each alone: those of norms are lost in a total
                for start, part in parts.get(name, []):
                    expected = whole.flatten()[start : start + part.numel()]
                    worst = float((part.float() - expected).abs().max() / whole.abs().max())
                    assert worst < relative * 5, (name, step)
            for name, weight in weights.items():
                assert (its_weights[name] - weight).abs().max() < relative * weight.abs().max(), (name, step)


WHOLE = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "zero3@cpu", "zero2@cpu-all")
GROUPED = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
MESHES = [*((plan, 2) for plan in WHOLE), *((plan, 4) for plan in (*WHOLE, *GROUPED))]


@pytest.mark.cover(mesh=lambda mesh: {**places(mesh[0]), "ranks": mesh[1]})
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("documents", [False, True], ids=["sequence", "documents"])
@pytest.mark.parametrize("mode", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}-{mesh[1]}")
def test_training_in_parts_is_training(
    mesh: tuple[str, int], mode: str, documents: bool, checkpointing: str, precision: str
) -> None:
    check(Case(*mesh, mode, documents, checkpointing, precision))


@pytest.mark.parametrize(("plan", "mode"), [("zero3", "gather"), ("zero2", "ring"), ("zero1", "ulysses")])
def test_matrices_and_sequences_may_be_shared_at_once(plan: str, mode: str) -> None:
    """Losses and norms: gradients of a rank's own part of a matrix are compared where matrices are cut."""
    expected = plain(True)

    def on_rank(rank: int) -> list[tuple[float, float]]:
        model: Any = copy.deepcopy(base())
        mesh = tz.mesh(tp=2, cp=2)
        tz.parallelize(model, mesh, context=mode)  # type: ignore[arg-type]
        context = context_of(model)
        assert context is not None
        model, optimizer = tz.shard(model, optimizer_of(model), plan, units=[Block], mesh=mesh)
        found = []
        for tokens, targets, positions in batches():
            model.set_gradient_denominator(int((targets != -100).sum()))
            inputs, its_targets, its_positions = context.split(tokens, targets, positions)
            loss = loss_of(model(inputs, its_positions), its_targets)
            loss.backward()
            found.append((float(loss.detach()), float(tz.clip_grad_norm_(model, float("inf")))))
            optimizer.step()
            optimizer.zero_grad()
        return found

    first, second, third, fourth = run_in_threads(4, on_rank)
    assert first == second and third == fourth  # neighbours share matrices and see the same
    for step, (loss, norm, *_) in enumerate(expected):
        assert first[step][0] + third[step][0] == pytest.approx(loss, rel=2e-6)
        assert first[step][1] == third[step][1] == pytest.approx(norm, rel=1e-5)
