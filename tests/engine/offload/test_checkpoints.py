"""What is saved on one tier is loaded on any other, under any plan, by any number of ranks, and goes on bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.engine import ModelState
from tests.checkpoint.subject import fast_folder
from tests.engine.offload.runs import SMALL_BLOCK, TIERS
from tests.engine.parity import assert_same_bits
from tests.engine.toys import Net, mesh_for, on_ranks, train
from tests.helpers.cover import mostly_long
from tests.helpers.threads import exclusive


class Where(NamedTuple):
    plan: str
    ranks: int
    tiers: str
    precision: str = "bf16"

    def built(self, folder: Path, seed: int = 1, mode: Any = "overlapped") -> tuple[Any, Any]:
        """A rank's part of a block is several cells."""
        with exclusive():
            torch.manual_seed(seed)
            model = Net(width=96, depth=2)
        model.blocks[1].up.bias.requires_grad_(False)
        groups = [[p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == matrix] for matrix in (1, 0)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2, fused=True)
        offload = tz.Offload(path=folder, step=mode, block_mib=SMALL_BLOCK, depth=2, direct=False)
        plan = tz.Plan.named(self.plan).on(**TIERS.get(self.tiers, {}))
        mesh = mesh_for(self.plan, self.ranks)
        return tz.shard(model, optimizer, plan, mesh=mesh, precision=self.precision, offload=offload.used_under(plan))


SOURCES = [
    Where("zero3", 2, "device"),
    Where("zero1", 3, "cpu"),
    Where("hpz", 4, "all on nvme"),
]
TARGETS = [*SOURCES, Where("zero0", 1, "nvme"), Where("zero2", 3, "cpu-all"), Where("zero3", 2, "shares")]
State = dict[tuple[str, str], Tensor]


def where_id(where: Where) -> str:
    return f"{where.plan} on {where.ranks} {where.tiers}"


def saved(path: str) -> State:
    source = checkpoint.open_source(path)
    return {(name, kind): source.whole(name, kind) for name, info in source.tensors.items() for kind in info.states}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with fast_folder(tmp_path_factory.mktemp("offload")) as found:
        yield found


@functools.cache
def source(where: Where, folder: Path) -> str:
    """A checkpoint after three steps."""

    def body(rank: int) -> None:
        model, optimizer = where.built(folder)
        train(model, optimizer, 3, rank)
        checkpoint.save(path, model, optimizer, {"step": 3})

    path = str(folder / "-".join(map(str, where)))
    on_ranks(where.ranks, body)
    return path


@functools.cache
def carried_on(path: str, where: Where, folder: Path, trained: bool) -> tuple[State, State, list[list[float]]]:
    """What a load of it gives, what two further steps make of that, and their losses."""
    names = [f"{path} to {'-'.join(map(str, where))} {when}" for when in ("before", "after")]

    def body(rank: int) -> list[float]:
        model, optimizer = where.built(folder, seed=2)
        if trained:
            train(model, optimizer, 1, rank, first=50)  # state that must not survive, and an update under way
        checkpoint.load(path, model, optimizer)
        checkpoint.save(names[0], model, optimizer, {})
        losses = train(model, optimizer, 2, rank, first=3)
        checkpoint.save(names[1], model, optimizer, {})
        return losses

    losses = on_ranks(where.ranks, body)
    return saved(names[0]), saved(names[1]), losses


@pytest.mark.cover(strength=1, turns=2)  # what is saved is the same on all of them: see below
@pytest.mark.parametrize("target", TARGETS, ids=where_id)
@pytest.mark.parametrize("origin", SOURCES, ids=where_id)
def test_any_tier_loads_what_any_other_saved(origin: Where, target: Where, folder: Path) -> None:
    path = source(origin, folder)
    trained = len(origin.plan) % 2 == len(target.tiers) % 2
    before, after, losses = carried_on(path, target, folder, trained)
    assert_same_bits(before, saved(path), "what was loaded")
    _, wanted, wanted_losses = carried_on(path, target._replace(tiers="device"), folder, False)
    assert losses == wanted_losses
    assert_same_bits(after, wanted, "what came of it")


FEW_TIERS = ["cpu-all", "all on nvme", "shares"]


@pytest.mark.parametrize("others", mostly_long([FEW_TIERS, [*TIERS]], FEW_TIERS), ids=["few", "all"])
def test_all_tiers_save_the_same(others: list[str], folder: Path) -> None:
    states = [saved(source(Where("zero3", 2, tiers), folder)) for tiers in ("device", *others)]
    assert any(kind == "exp_avg_sq" for _, kind in states[0])
    for state in states[1:]:
        assert_same_bits(state, states[0], "the checkpoint")


def test_a_load_drops_the_update_that_is_under_way_and_moments_that_are_not_there(folder: Path) -> None:
    """Back to a model that has never been trained: no moment of the later steps comes back."""

    def body(rank: int, tiers: str, go_back: bool) -> list[float]:
        model, optimizer = Where("zero3", 2, tiers).built(folder)
        path = str(folder / f"untrained on {tiers}")
        if go_back:
            checkpoint.save(path, model, optimizer, {})
            train(model, optimizer, 2, rank)
            checkpoint.load(path, model, optimizer)
            assert {piece.kind for piece in ModelState(model).pieces()} == {"weight"}
        return train(model, optimizer, 3, rank)

    for tiers in ("cpu-all", "all on nvme"):
        wanted, found = (on_ranks(2, lambda rank, go=go: body(rank, tiers, go)) for go in (False, True))  # noqa: B023
        assert found == wanted
