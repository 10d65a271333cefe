"""A small sharded model whose whole state is a function of a step number, so that anyone can tell what a load gave."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from terrazzo import checkpoint
from tests.checkpoint.faults import PATIENCE_S, calls_of, hidden, sampled
from tests.helpers.threads import exclusive, run_in_threads

Subject = tuple[nn.Module, Any]
State = dict[str, bytes]


FILLED: tuple[str, ...] = ("embedding.weight", "head.weight", "gain")
FILLED += ("linear.weight", "linear.bias", "norm.weight", "norm.bias", "frozen")
"""Parameters in the order in which they take random numbers: that of the checkpoint of version 2."""


class Net(nn.Module):
    """A tied, a frozen and a 0-dim parameter, sizes that no number of ranks divides, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.linear(self.embedding(tokens))
        out: Tensor = self.head(self.norm(hidden) * self.gain + hidden)  # or the gradient of a bias would be rounding
        return out


def build(step: int = 0, *, plan: str = "zero3", width: int = 5) -> Subject:
    """A model and its AdamW with two groups, in the state of `step`. Collective."""
    with exclusive():
        torch.manual_seed(0)
        model = Net(width)
        others = [*model.linear.parameters(), *model.norm.parameters(), model.gain, model.frozen]
        groups: list[dict[str, Any]] = [{"params": [model.embedding.weight]}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model, optimizer = tz.shard(model, optimizer, plan=plan)
    model(torch.arange(7)).square().mean().backward()  # so that the optimizer has its states
    optimizer.step()
    optimizer.zero_grad()
    put(model, optimizer, step)
    return model, optimizer


def put(model: nn.Module, optimizer: Any, step: int) -> None:
    """The state of `step`: parameters, buffers, moments, hyper-parameters and random generators. Collective."""
    generator = torch.Generator().manual_seed(step)
    with tz.gathered(model, write=True) as parameters, torch.no_grad():
        for name in FILLED:
            value = parameters[name]
            value.copy_(torch.rand(value.shape, generator=generator))
        for buffer in model.buffers():
            buffer.fill_(step)
    for state in optimizer.state.values():
        for kind, value in state.items():
            numbers = step + len(kind) + torch.arange(value.numel()).view(value.shape) / 64
            value.copy_(torch.where(value == 0, 0, numbers))  # between parameters there is padding, which stays 0
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = (step + index) / 1024
    with exclusive():
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)


def state_of(model: nn.Module, optimizer: Any) -> State:
    """Every byte that a load may change on this rank, by what it is. Collective."""
    found: State = {}
    with tz.gathered(model) as parameters:
        found |= {name: _bytes(value) for name, value in parameters.items()}
    found |= {name: _bytes(buffer) for name, buffer in model.named_buffers()}
    for index, state in enumerate(optimizer.state.values()):
        found |= {f"{index}.{kind}": _bytes(value) for kind, value in state.items()}
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index}"] = repr({key: value for key, value in group.items() if key != "params"}).encode()
    if dist.get_world_size() == 1:  # ranks that are threads share them
        found["rng"] = repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())).encode()
    return found


def save(root: Path, step: int) -> None:
    """The checkpoint of `step`, of a model built for it. Collective."""
    checkpoint.save(checkpoint.step_path(root, step), *build(step), {"step": step})


def differences(found: State, expected: State) -> list[str]:
    """The names of what differs."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


class Witness:
    """Loads what is in `root` and compares it with what each step was. Its functions are collective."""

    def __init__(self, root: Path, steps: range) -> None:
        self.root = root
        self.model, self.optimizer = build()
        self.expected: dict[int, State] = {}
        for step in steps:
            self.expects(step)

    def expects(self, step: int) -> None:
        """Learn what the state of `step` is."""
        put(self.model, self.optimizer, step)
        self.expected[step] = state_of(self.model, self.optimizer)

    def loads(self, step: int) -> None:
        """The checkpoint of `step` is there and bitwise what was saved."""
        put(self.model, self.optimizer, 99)
        checkpoint.load(checkpoint.step_path(self.root, step), self.model, self.optimizer)
        assert differences(state_of(self.model, self.optimizer), self.expected[step]) == []

    def sees(self) -> list[int]:
        """The steps that are visible, each checked to load."""
        found = [int(path[-8:]) for path in checkpoint.complete_checkpoints(self.root)]
        for step in found:
            self.loads(step)
        return found

    def saves(self, step: int) -> None:
        """A save succeeds and leaves nothing hidden behind; then its checkpoint is removed."""
        self.saves_beside(step)
        assert hidden(self.root) == []

    def saves_beside(self, step: int) -> None:
        """A save succeeds, whatever else is going on; then its checkpoint is removed."""
        put(self.model, self.optimizer, step)
        checkpoint.save(checkpoint.step_path(self.root, step), self.model, self.optimizer, {"step": step})
        self.loads(step)
        self.clear(step)

    def clear(self, step: int) -> None:
        """Remove the checkpoint of `step`, whatever is there."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoint.step_path(self.root, step), ignore_errors=True)
        dist.barrier()


def one_rank(root: Path, work: Callable[[Witness, Callable[[], None]], None]) -> None:
    """`work(witness, attempt)` as one rank: step 1 is saved, and `attempt()` saves step 2."""

    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        save(root, 1)
        model, optimizer = build(2)

        def attempt() -> None:
            put(model, optimizer, 2)
            checkpoint.save(checkpoint.step_path(root, 2), model, optimizer, {"step": 2})

        work(witness, attempt)

    run_in_threads(1, body, timeout_s=PATIENCE_S)


def points_of(root: Path, work: Callable[[], None], count: int) -> list[int]:
    """Numbers of the calls of `work` after which to try; `count` of those that change the disk, and some others."""
    calls = calls_of(root, work)
    changing = [call.number for call in calls if call.changes]
    others = [call.number for call in calls if not call.changes]
    return sorted({-1, *sampled(changing, count), *sampled(others, 4)})


@contextmanager
def fast_folder(otherwise: Path) -> Iterator[Path]:
    """A folder in memory where there is room; what a flush does to a real disk is in `test_power_loss.py`."""
    if not os.access("/dev/shm", os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _bytes(value: Tensor) -> bytes:
    return value.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()  # a copy: numpy pins its memory
