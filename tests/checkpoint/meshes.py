"""A model of a few parameters, trained in one process and on any mesh, where it is saved and loaded.

The loss is a sum over elements, so that each is trained as if it were alone, wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo import checkpoint
from terrazzo.engine import ModelState
from tests.checkpoint.documented import read_as_documented
from tests.helpers.threads import run_in_threads

State = dict[tuple[str, str], Tensor]
"""The whole tensors by name and kind."""

Sharded = tuple[nn.Module, Any]
"""A model as `tz.shard` gives it, and its optimizer."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=False)


def step(model: nn.Module, optimizer: Any) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_alone(model: nn.Module) -> list[State]:
    """The whole state after each of three steps of one process."""
    optimizer, found = adamw(model.parameters()), []
    for _ in range(3):
        step(model, optimizer)
        state = {(name, "weight"): p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            state |= {(name, kind): value.clone().reshape(value.shape) for kind, value in optimizer.state[p].items()}
        found.append(state)
    return found


def save_two_steps(path: Path, ranks: int, sharded: Callable[[], Sharded]) -> None:
    """The checkpoint of two steps on so many ranks."""

    def body(rank: int) -> None:
        model, optimizer = sharded()
        step(model, optimizer)
        step(model, optimizer)
        checkpoint.save(path, model, optimizer, {"step": 2})
        checkpoint.check_replicas(model)

    run_in_threads(ranks, body)


def differences(model: nn.Module, expected: State) -> list[str]:
    """What this rank gives that is not as in one process."""
    wrong = []
    for piece in ModelState(model).pieces():
        whole = expected[piece.name, piece.kind]
        there = whole.reshape(-1) if whole.numel() == piece.tile.numel else whole[piece.tile.slices].reshape(-1)
        if not torch.equal(piece.tensor, there[piece.start : piece.stop]):
            wrong.append(f"{piece.name}, {piece.kind}, {piece.tile}")
    return wrong


def assert_holds(path: Path, expected: State) -> None:
    """A checkpoint has each element once, and as one process has it."""
    found = read_as_documented(path)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].tobytes() == values.reshape(-1).numpy().tobytes(), key


def assert_resumes(ranks: int, sharded: Callable[[], Sharded], saved: list[Path], alone: list[State]) -> None:
    """From each checkpoint of two steps, so many ranks have what one process has, and after one more step too."""

    def body(rank: int) -> list[str]:
        model, optimizer = sharded()
        wrong = []
        for path in saved:
            step(model, optimizer)  # so that there is something else
            checkpoint.load(path, model, optimizer)
            wrong += differences(model, alone[1])
            step(model, optimizer)
            wrong += differences(model, alone[2])
        return wrong

    assert run_in_threads(ranks, body) == [[]] * ranks
