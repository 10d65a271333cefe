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
from terrazzo.engine import Box, Family, Record, leave_record
from tests.checkpoint.meshes import State, adamw, assert_holds, assert_resumes, save_two_steps, step, steps_alone
from tests.helpers.cover import mostly_long
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


def sharded(mesh: Mesh) -> tuple[nn.Module, Any]:
    axes = {"dp_replicate": 2} if mesh.plan == "hybrid_shard" else {}
    return tz.shard(
        Net(mesh, dist.get_rank()), adamw, mesh.plan, mesh=tz.mesh(tp=mesh.tp, ep=mesh.ep, device="cpu", **axes)
    )


@pytest.fixture(scope="module")
def alone() -> list[State]:
    return steps_alone(Net(MESHES[0]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Mesh, Path]:
    """The checkpoint of two steps on every mesh."""
    root = tmp_path_factory.mktemp("experts")
    for mesh in MESHES:
        save_two_steps(root / str(mesh), mesh.ranks, lambda mesh=mesh: sharded(mesh))
    return {mesh: root / str(mesh) for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_writes_each_element_once_and_as_one_process_has_it(
    mesh: Mesh, saved: dict[Mesh, Path], alone: list[State]
) -> None:
    assert_holds(saved[mesh], alone[1])


@pytest.mark.parametrize("target", mostly_long(MESHES, *MESHES[1::3]), ids=str)
def test_every_mesh_resumes_every_other_to_the_bit(target: Mesh, saved: dict[Mesh, Path], alone: list[State]) -> None:
    assert_resumes(target.ranks, lambda: sharded(target), list(saved.values()), alone)


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
