"""A model whose experts ranks share, saved on every mesh and loaded on every other.

The oracle is a plain loop in one process. The loss is a sum over elements, and a rank counts its experts as often as it
has a share of them: as their gradient is there from the rows of all ranks, it is here from its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import Box, Family, ModelState, Record, leave_record
from tests.checkpoint.documented import read_as_documented
from tests.helpers.threads import run_in_threads

SHAPES = {"gate": (8, 3, 5), "bias": (8,), "norm": (6,)}
EXPERTS = ("gate", "bias")


class Mesh(NamedTuple):
    plan: str
    ranks: int
    tp: int
    ep: int

    def __str__(self) -> str:
        return f"{self.plan}-{self.ranks}-tp{self.tp}-ep{self.ep}"


MESHES = [
    Mesh("zero3", 1, 1, 1),
    Mesh("zero0", 4, 1, 2),
    Mesh("zero3", 4, 1, 4),
    Mesh("zero2", 4, 2, 2),
    Mesh("hybrid_shard", 4, 1, 2),
    Mesh("zero3@cpu", 4, 4, 2),
]

State = dict[tuple[str, str], Tensor]


class Net(nn.Module):
    """All parameters, or a rank's experts of them."""

    def __init__(self, mesh: Mesh, rank: int = 0) -> None:
        super().__init__()
        self.counts = mesh.ep / mesh.tp
        own = 8 // mesh.ep
        for number, (name, shape) in enumerate(SHAPES.items()):
            full = torch.rand(shape, generator=torch.Generator().manual_seed(number))
            box, family = Box.all_of(shape), Family.SHARED
            if name in EXPERTS:
                first = rank % mesh.ep * own
                box, family = Box.cut(shape, 0, [(first, first + own)]), Family.EXPERT
            setattr(self, name, nn.Parameter(box.of(full)))
            if (family is Family.EXPERT and mesh.ep > 1) or mesh.tp > 1:
                leave_record(self, name, Record(family, box, replicated=family is Family.SHARED))

    def forward(self) -> Tensor:
        sums = {name: each.pow(3).sum() for name, each in self.named_parameters()}
        return torch.stack([each * (self.counts if name in EXPERTS else 1) for name, each in sums.items()]).sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=False)


def sharded(mesh: Mesh) -> tuple[nn.Module, Any]:
    axes = {"dp_replicate": 2} if mesh.plan == "hybrid_shard" else {}
    return tz.shard(
        Net(mesh, dist.get_rank()), adamw, mesh.plan, mesh=tz.mesh(tp=mesh.tp, ep=mesh.ep, device="cpu", **axes)
    )


def step(model: nn.Module, optimizer: Any) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def differences(model: nn.Module, expected: State) -> list[str]:
    """What this rank gives that is not as in one process."""
    wrong = []
    for piece in ModelState(model).pieces():
        whole = expected[piece.name, piece.kind]
        there = whole.reshape(-1) if whole.numel() == piece.tile.numel else whole[piece.tile.slices].reshape(-1)
        if not torch.equal(piece.tensor, there[piece.start : piece.stop]):
            wrong.append(f"{piece.name}, {piece.kind}, {piece.tile}")
    return wrong


@pytest.fixture(scope="module")
def alone() -> list[State]:
    """The whole state after each of three steps of one process."""
    model = Net(MESHES[0])
    optimizer = adamw(model.parameters())
    found = []
    for _ in range(3):
        step(model, optimizer)
        state = {(name, "weight"): p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            state |= {(name, kind): value.clone().reshape(value.shape) for kind, value in optimizer.state[p].items()}
        found.append(state)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Mesh, Path]:
    """The checkpoint of two steps on every mesh."""
    root = tmp_path_factory.mktemp("experts")

    def body(mesh: Mesh, path: Path) -> None:
        model, optimizer = sharded(mesh)
        step(model, optimizer)
        step(model, optimizer)
        checkpoint.save(path, model, optimizer, {"step": 2})
        checkpoint.check_replicas(model)

    paths = {mesh: root / str(mesh) for mesh in MESHES}
    for mesh, path in paths.items():
        run_in_threads(mesh.ranks, lambda rank, mesh=mesh, path=path: body(mesh, path))
    return paths


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_writes_each_element_once_and_as_one_process_has_it(
    mesh: Mesh, saved: dict[Mesh, Path], alone: list[State]
) -> None:
    found = read_as_documented(saved[mesh])
    assert found.keys() == alone[1].keys()
    for key, values in alone[1].items():
        assert found[key].tobytes() == values.reshape(-1).numpy().tobytes(), key


@pytest.mark.parametrize("target", MESHES, ids=str)
def test_every_mesh_resumes_every_other_to_the_bit(target: Mesh, saved: dict[Mesh, Path], alone: list[State]) -> None:
    def body(rank: int) -> list[str]:
        model, optimizer = sharded(target)
        wrong = []
        for path in saved.values():
            step(model, optimizer)  # so that there is something else
            checkpoint.load(path, model, optimizer)
            wrong += differences(model, alone[1])
            step(model, optimizer)
            wrong += differences(model, alone[2])
        return wrong

    assert run_in_threads(target.ranks, body) == [[]] * target.ranks


def test_copies_of_experts_that_differ_are_found() -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(Mesh("zero0", 4, 1, 2))
        step(model, optimizer)
        if rank == 3:  # what it has of them rank 1 has too
            with torch.no_grad():
                model.gate.view(-1)[0].add_(1.0)  # type: ignore[union-attr, operator]
        checkpoint.check_replicas(model)

    with pytest.raises(tz.Diverged, match=r"gate, .*of 2 copies that should be equal, ranks 1, 3 differ"):
        run_in_threads(4, body)
