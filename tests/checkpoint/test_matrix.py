"""Every plan on 1 to 4 ranks reads what every plan on 1 to 4 ranks has written, to the bit.

The oracle is a plain PyTorch loop in one process, whose state the first checkpoint must equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.loading.load import restore
from terrazzo.checkpoint.source import OptimizerInfo, Source, StateInfo, TensorInfo
from terrazzo.engine import ModelState, engine_of
from tests.engine.toys import Net, adamw, batch, loss_of
from tests.helpers.cover import places
from tests.helpers.threads import exclusive, run_in_threads

PLANS = ("zero0", "zero1", "zero2", "zero3", "hybrid_shard", "hfsdp")
MESHES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2)}
TOPOLOGIES = [(plan, ranks) for plan in PLANS for ranks in MESHES]

State = dict[str, dict[str, Tensor]]


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three steps without Terrazzo, a frozen parameter among them."""
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].up.bias.requires_grad_(False)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    found: State = {}
    for name, parameter in model.named_parameters():
        found[name] = {"weight": parameter.detach().clone()}
        found[name] |= {kind: value.detach().clone() for kind, value in optimizer.state.get(parameter, {}).items()}
    return found


class Plain(Source):
    """The state of the plain run as a checkpoint to restore."""

    format = "plain"

    def __init__(self, state: State, optimizer: torch.optim.Optimizer) -> None:
        super().__init__("plain")
        self._state = state
        self.tensors = {
            name: TensorInfo(
                tuple(kinds["weight"].shape),
                {kind: StateInfo(value.dtype, value.numel()) for kind, value in kinds.items()},
            )
            for name, kinds in state.items()
        }
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        trained = [name for name, kinds in state.items() if len(kinds) > 1]
        self.optimizer = OptimizerInfo(type(optimizer).__name__, [{**group, "params": trained}])

    def _read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self._state[name][kind].reshape(-1)[start:stop]


def sharded(plan: str, ranks: int) -> tuple[nn.Module, Any]:
    with exclusive():
        torch.manual_seed(1)
        model = Net()
        model.blocks[1].up.bias.requires_grad_(False)
    mesh = init_device_mesh("cpu", MESHES[ranks], mesh_dim_names=("dp_replicate", "dp_shard"))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    return tz.shard(model, optimizer, plan, units=["blocks.*"], mesh=mesh)


def differences(model: nn.Module, expected: State) -> list[str]:
    """What this rank holds that is not `expected`, and what it should hold of the weights."""
    with tz.gathered(model) as parameters:
        wrong = [name for name, value in parameters.items() if not torch.equal(value, expected[name]["weight"])]
    for piece in ModelState(model).pieces():
        part = expected[piece.name][piece.kind].reshape(-1)[piece.start : piece.stop]
        if not torch.equal(piece.tensor, part):
            wrong.append(f"{piece.name}, {piece.kind}, {piece.start}..{piece.stop}")
    return wrong


class Written:
    """The plain run's state, and a checkpoint of it in each topology that is asked for."""

    def __init__(self, folder: Path) -> None:
        self.model, self.optimizer = plain()
        self.state, self._folder = state_of(self.model, self.optimizer), folder

    def by(self, plan: str, ranks: int) -> Path:
        path = self._folder / f"{plan}-{ranks}"

        def body(rank: int) -> None:
            own, own_optimizer = sharded(plan, ranks)
            restore(Plain(self.state, self.optimizer), own, own_optimizer)
            checkpoint.save(path, own, own_optimizer, {})

        if not path.exists():
            run_in_threads(ranks, body)
        return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("matrix"))


def axes(topology: tuple[str, int]) -> dict[str, object]:
    plan, ranks = topology
    return {**places(plan), "ranks": ranks}


@pytest.mark.cover(turns=2, target=axes, origin=axes)
@pytest.mark.parametrize("origin", TOPOLOGIES, ids="{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("target", TOPOLOGIES, ids="{0[0]}-{0[1]}".format)
def test_every_topology_restores_every_other_to_the_bit(
    target: tuple[str, int], origin: tuple[str, int], written: Written
) -> None:
    state, path, (plan, ranks) = written.state, written.by(*origin), target

    def body(rank: int) -> list[str]:
        model, optimizer = sharded(plan, ranks)
        with torch.no_grad():
            for bucket in engine_of(model).buckets():
                bucket.master.data.fill_(7.0)
        checkpoint.load(path, model, optimizer)
        wrong = differences(model, state)
        held = {(piece.name, piece.kind) for piece in ModelState(model).pieces()}
        assert ranks > 1 or held == {(name, kind) for name, kinds in state.items() for kind in kinds}
        return wrong

    assert run_in_threads(ranks, body) == [[]] * ranks


def test_one_to_seven_to_three_ranks(written: Written, tmp_path: Path) -> None:
    state, path = written.state, written.by("zero0", 1)
    for count in (7, 3):

        def body(rank: int, path: Path = path, count: int = count) -> list[str]:
            with exclusive():
                model = Net()
                model.blocks[1].up.bias.requires_grad_(False)
            own, optimizer = tz.shard(
                model, adamw([p for p in model.parameters() if p.requires_grad]), "zero3", units=["blocks.*"]
            )
            checkpoint.load(path, own, optimizer)
            checkpoint.save(tmp_path / f"{count}", own, optimizer, {})
            return differences(own, state)

        assert run_in_threads(count, body) == [[]] * count
        path = tmp_path / f"{count}"
