"""Small models, batches and one-line steps that the behaviour tests share; the oracle is plain PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import PLANS
from tests.helpers.threads import run_in_threads

T = TypeVar("T")

VOCABULARY = 17
TABLE_1D = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")
TABLE_2D = ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
EVERY_PLAN = (*TABLE_1D, *TABLE_2D)
EVERY_NAME = PLANS


class Block(nn.Module):
    """A residual block of odd sizes."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, head: the root unit and `depth` units of class `Block`."""

    def __init__(self, width: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def unpickled(module: nn.Module) -> Any:
    """A copy of a module, by way of bytes."""
    return pickle.loads(pickle.dumps(module))  # noqa: S301


@contextmanager
def without_collector() -> Iterator[None]:
    """What nobody holds inside is freed at once, or not at all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def batch(step: int = 0, rank: int = 0) -> Tensor:
    """Token ids [2, 6] that every process can make again."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, steps: int, rank: int, first: int = 0) -> list[float]:
    """`steps` steps on this rank's batches; the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_alone(
    model: nn.Module, optimizer: Optimizer, steps: int, world_size: int, first: int = 0
) -> list[list[float]]:
    """The same steps in plain PyTorch: the mean over the ranks' losses, differentiated in one process."""
    losses = []
    for step in range(first, first + steps):
        each = [loss_of(model, batch(step, rank)) for rank in range(world_size)]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


def mesh_for(plan: str, world_size: int) -> DeviceMesh | None:
    """(2, world_size / 2) ranks for the plans that need two axes, else the default mesh."""
    if plan not in TABLE_2D:
        return None
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters of a sharded model; call it on every rank."""
    with tz.gathered(model) as parameters:
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def on_ranks(world_size: int, function: Callable[[int], T], **options: Any) -> list[T]:
    return run_in_threads(world_size, function, **{"timeout_s": 20.0, **options})


def sharded(base: nn.Module, plan: str = "zero3", world_size: int = 2, **options: Any) -> tuple[Any, Any]:
    """A sharded copy of `base` with AdamW; call it on every rank."""
    model = copy.deepcopy(base)
    return tz.shard(model, adamw(model.parameters()), plan, mesh=mesh_for(plan, world_size), **options)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        options: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "msg": lambda m, n=name: f"{n}: {m}"}
        torch.testing.assert_close(found[name], value.detach(), **options)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.detach()), name


Loop = Callable[[Any, Any, Callable[[int], Tensor]], None]
"""A training loop (model, optimizer, batch of a step); alone it sees every rank's batches in one."""


def follows_one_process(base: nn.Module, loop: Loop, plan: str = "zero3", world_size: int = 2) -> None:
    """`loop` on ranks leaves the parameters that it leaves in one process on the ranks' batches together."""
    alone = copy.deepcopy(base)
    loop(alone, adamw(alone.parameters()), lambda s: torch.cat([batch(s, r) for r in range(world_size)]))

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = sharded(base, plan, world_size)
        loop(model, optimizer, lambda step: batch(step, rank))
        return full_parameters(model)

    for found in on_ranks(world_size, body):
        assert_close(found, dict(alone.named_parameters()), 2e-6)


def step(model: Any, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_loop(model: Any, optimizer: Any, data: Callable[[int], Tensor]) -> None:
    for number in range(5):
        step(model, optimizer, loss_of(model, data(number)))
