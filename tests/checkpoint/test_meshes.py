"""A model whose parameters ranks share, saved on every mesh and loaded on every other.

The parameters are cut here by hand, and the oracle is a plain loop over the whole ones in one process: the loss is a
sum over elements, so that each is trained as if it were alone, wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import Box, Family, Record, leave_record
from terrazzo.errors import BadInput
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.checkpoint.documented import read_as_documented
from tests.checkpoint.meshes import (
    State,
    adamw,
    assert_holds,
    assert_resumes,
    differences,
    save_two_steps,
    step,
    steps_alone,
)
from tests.helpers.cover import mostly_long
from tests.helpers.threads import exclusive, run_in_threads

Cut = tuple[tuple[int, ...], int, tuple[int, ...]]
Mesh = tuple[str, int, int]

# By name the shape, and the dim along which intervals of it are cut, each into as many parts as there are ranks. Of
# three rows the first rank of four has none; `fused` is joined along its columns, so that its rows are in two parts.
CUTS: dict[str, Cut] = {
    "embed": ((11, 6), 0, (0, 11)),
    "qkv": ((12, 6), 0, (0, 8, 10, 12)),
    "down": ((6, 9), 1, (0, 9)),
    "fused": ((5, 12), 1, (0, 6, 12)),
    "experts": ((3, 8, 5), 1, (0, 4, 8)),
    "bias": ((3,), 0, (0, 3)),
}
SHARED: dict[str, tuple[int, ...]] = {"norm": (6,), "scale": ()}
MESHES: tuple[Mesh, ...] = (
    ("zero3", 1, 1), ("zero0", 4, 1), ("zero0", 1, 2), ("zero1", 2, 2), ("zero3", 2, 2), ("zero2@cpu", 1, 4),
)  # fmt: skip


class Net(nn.Module):
    """All parameters, or a rank's parts of them."""

    def __init__(self, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        for number, name in enumerate({**CUTS, **SHARED}):
            shape = CUTS[name][0] if name in CUTS else SHARED[name]
            full = torch.rand(shape, generator=torch.Generator().manual_seed(number))
            box, family = Box.all_of(shape), Family.SHARED
            if name in CUTS:
                box, family = Box.cut(shape, CUTS[name][1], list(_runs(CUTS[name][2], tp, rank))), Family.DENSE
            setattr(self, name, nn.Parameter(box.of(full)))
            if tp > 1:
                leave_record(self, name, Record(family, box, replicated=family is Family.SHARED))

    def forward(self) -> Tensor:
        return torch.stack([p.pow(3).sum() for p in self.parameters()]).sum()


def _runs(edges: tuple[int, ...], tp: int, rank: int) -> Iterator[tuple[int, int]]:
    for first, last in pairwise(edges):
        yield first + (last - first) * rank // tp, first + (last - first) * (rank + 1) // tp


def sharded(mesh: Mesh) -> tuple[nn.Module, Any]:
    plan, _, tp = mesh
    with exclusive():
        model = Net(tp, dist.get_rank() % tp)
    return tz.shard(model, adamw, plan, mesh=tz.mesh(tp=tp) if tp > 1 else None)


@pytest.fixture(scope="module")
def alone() -> list[State]:
    return steps_alone(Net())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Mesh, Path]:
    """The checkpoint of two steps on every mesh."""
    root = tmp_path_factory.mktemp("meshes")
    paths = {mesh: root / f"{number}" for number, mesh in enumerate(MESHES)}
    for mesh, path in paths.items():
        save_two_steps(path, mesh[1] * mesh[2], lambda mesh=mesh: sharded(mesh))
    return paths


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}-{mesh[1]}x{mesh[2]}")
def test_every_mesh_writes_each_element_once_and_as_one_process_has_it(
    mesh: Mesh, saved: dict[Mesh, Path], alone: list[State]
) -> None:
    assert_holds(saved[mesh], alone[1])


@pytest.mark.parametrize(
    "target", mostly_long(zip(MESHES), *zip(MESHES[1::3])), ids=lambda mesh: f"{mesh[0]}-{mesh[1]}x{mesh[2]}"
)
def test_every_mesh_resumes_every_other_to_the_bit(target: Mesh, saved: dict[Mesh, Path], alone: list[State]) -> None:
    assert_resumes(target[1] * target[2], lambda: sharded(target), list(saved.values()), alone)


def test_whole_weights_are_loaded_in_parts(saved: dict[Mesh, Path], alone: list[State]) -> None:
    def body(rank: int) -> list[str]:
        model, _ = sharded(("zero3", 2, 2))
        checkpoint.load_weights(model, saved["zero0", 4, 1])
        return differences(model, {key: values for key, values in alone[1].items() if key[1] == "weight"})

    assert run_in_threads(4, body) == [[]] * 4


def test_what_does_not_fit_is_told_by_whole_shapes(saved: dict[Mesh, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CUTS, "down", ((6, 10), 1, (0, 10)))

    def body(rank: int) -> None:
        model, optimizer = sharded(("zero3", 1, 2))
        with pytest.raises(BadInput, match=r"down is \[6, 9\] in the checkpoint and \[6, 10\] in the model"):
            checkpoint.load(saved["zero3", 2, 2], model, optimizer)

    run_in_threads(2, body)


def test_copies_along_every_axis_are_compared(alone: list[State]) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(("zero0", 2, 2))
        step(model, optimizer)
        checkpoint.check_replicas(model)

    run_in_threads(4, body)


def decoder(mesh: Mesh) -> tuple[nn.Module, Any]:
    plan, _, tp = mesh
    config = DecoderConfig(23, dim=8, layers=2, heads=4, kv_heads=2, ffn_dim=12, max_sequence_length=8)
    with exclusive():
        torch.manual_seed(0)
        model: nn.Module = Decoder(config)
    axes = tz.mesh(tp=tp) if tp > 1 else None
    if axes is not None:
        model = tz.parallelize(model, axes)
    return tz.shard(model, adamw, plan, mesh=axes, units=[Block])


def test_the_decoder_goes_on_with_the_same_loss_on_other_meshes(tmp_path: Path) -> None:
    """Saved again, it is the same to the bit: of what ranks share, and of heads and vocabulary that they divide."""
    tokens = torch.arange(16).view(2, 8) % 23

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1))

    def loss_of(model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model))

    def first(rank: int) -> float:
        model, optimizer = decoder(("zero3", 2, 2))
        loss(model).backward()
        optimizer.step()
        checkpoint.save(tmp_path / "first", model, optimizer, {})
        return loss_of(model)

    expected = run_in_threads(4, first)[0]
    saved = read_as_documented(tmp_path / "first")
    for number, mesh in enumerate([("zero2", 1, 1), ("zero0", 1, 2), ("zero1", 4, 1), ("zero3@cpu", 1, 2)]):

        def body(rank: int, mesh: Mesh = mesh, path: Path = tmp_path / f"{number}") -> float:
            model, optimizer = decoder(mesh)
            checkpoint.load(tmp_path / "first", model, optimizer)
            checkpoint.save(path, model, optimizer, {})
            return loss_of(model)

        assert run_in_threads(mesh[1] * mesh[2], body)[0] == pytest.approx(expected, rel=1e-6)
        again = read_as_documented(tmp_path / f"{number}")
        assert again.keys() == saved.keys()
        assert all(again[key].tobytes() == saved[key].tobytes() for key in saved)
