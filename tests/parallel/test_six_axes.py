"""All axes in one run, its states in files, that goes on over other ones: against one process in plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.parallel import context_of
from terrazzo.train.model.decoder import Block, Decoder
from terrazzo.train.model.experts import auxiliary_loss, balance_experts
from tests.helpers.threads import run_in_threads
from tests.parallel.test_expert_training import SIZES
from tests.parallel.test_training_in_parts import loss_of, optimizer_of

TOKENS = 16


@dataclass(frozen=True)
class Mesh:
    plan: str
    axes: tuple[tuple[str, int], ...]
    ranks: int
    chunks: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)


BESIDE = (("pp", 2), ("cp", 2), ("tp", 2), ("ep", 4))
FOUR = Mesh("zero3@nvme-all", BESIDE, 8)
FIVE = Mesh("zero3@nvme-all", (*BESIDE, ("dp_shard", 2)), 16)
ALL = Mesh("hybrid_shard@nvme-all", (*BESIDE, ("dp_shard", 2), ("dp_replicate", 2)), 32)
OTHERS = [
    Mesh("zero3", (("pp", 2), ("dp_shard", 2), ("ep", 2)), 4, chunks=2),
    Mesh("zero2@cpu", (("pp", 4), ("tp", 2)), 8),
    Mesh("zero1", (("cp", 2), ("ep", 2)), 2),
]


@cache
def base() -> Decoder:
    torch.manual_seed(1)
    model = Decoder(replace(SIZES, tie_embeddings=False, layers=2))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.6 if "router" in name else 0.1)
    return model


@cache
def batches(rows: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(61, (3, rows, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


@cache
def plain(rows: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses, and what is saved behind each step."""
    model, found = copy.deepcopy(base()), []
    optimizer = optimizer_of(model)
    for tokens, targets in batches(rows):
        loss = loss_of(model(tokens), targets)
        aside = auxiliary_loss(model)
        assert aside is not None
        ((loss + aside) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for block in model.blocks:
            router: Any = block.feed_forward.router  # type: ignore[union-attr]
            load = router.load.double()
            router.bias += router.config.bias_rate * torch.sign(load.mean() - load).float()
            router.bias -= router.bias.mean()
            router.load.zero_()
        found.append((float(loss.detach()), {name: each.clone() for name, each in model.state_dict().items()}))
    return found


def steps(mesh: Mesh, rank: int, root: Path, first: int, last: int, rows: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Steps from `first` on, where another run has saved; what ends the first steps is saved."""
    model: Any = copy.deepcopy(base())
    axes = tz.mesh(**mesh.sizes)  # type: ignore[arg-type]
    pipeline = tz.Pipeline(chunks=mesh.chunks) if "pp" in mesh.sizes else None
    context = context_of(tz.parallelize(model, axes, pipeline=pipeline))
    offload = tz.Offload(path=str(root)) if "nvme" in mesh.plan else None
    model, optimizer = tz.shard(model, optimizer_of(model), mesh.plan, units=[Block], mesh=axes, offload=offload)
    if first:
        checkpoint.load(root / str(first), model, optimizer)
    beside = mesh.sizes.get("tp", 1) * mesh.sizes.get("cp", 1)
    readers = mesh.ranks // (beside * mesh.sizes.get("pp", 1))
    found = []
    for tokens, targets in batches(rows)[first:last]:
        micro_batches = []
        for row in range(rank // beside % readers, rows, readers):
            part: tuple[Tensor, ...] = tokens[row : row + 1], targets[row : row + 1], torch.arange(TOKENS)[None]
            own = part if context is None else context.split(*part)
            micro_batches.append(((own[0], own[2]), own[1]))
        loss = tz.step(model, micro_batches, loss_of, denominator=targets.numel(), auxiliary=auxiliary_loss)
        optimizer.step()
        optimizer.zero_grad()
        balance_experts(model)
        found.append((float(loss), tz.full_state_dict(model, keep=rank == 0)))
    if not first:
        checkpoint.save(root / str(last), model, optimizer)
    return found


def assert_trained(mesh: Mesh, ranks: list[Any], first: int, rows: int) -> None:
    for step, (expected, weights) in enumerate(plain(rows)[first : first + len(ranks[0])]):
        total = sum(each[step][0] for each in ranks) / (mesh.sizes.get("tp", 1) * mesh.sizes.get("pp", 1))
        assert total == pytest.approx(expected, rel=1e-5)
        state = ranks[0][step][1]
        assert state.keys() == weights.keys()
        for name, weight in weights.items():
            assert (state[name] - weight).abs().max() <= 2e-5 * weight.abs().max(), (name, step)


@pytest.mark.parametrize(
    ("mesh", "others", "rows"),
    [(FOUR, OTHERS[:1], 4), *(pytest.param(mesh, OTHERS, 8, marks=pytest.mark.long) for mesh in (FOUR, FIVE, ALL))],
    ids=["four", "four and all others", "five", "all"],
)
def test_all_axes_train_and_others_go_on(mesh: Mesh, others: list[Mesh], rows: int, tmp_path: Path) -> None:
    plain(rows)
    ranks = run_in_threads(mesh.ranks, lambda rank: steps(mesh, rank, tmp_path, 0, 2, rows), timeout_s=120.0)
    assert_trained(mesh, ranks, 0, rows)
    for other in others:
        ranks = run_in_threads(other.ranks, lambda rank, other=other: steps(other, rank, tmp_path, 2, 3, rows))
        assert_trained(other, ranks, 2, rows)
