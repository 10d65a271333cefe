"""What is refused inside of an average, with half a step, and in a round: each call in each of these states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from tests.engine.toys import on_ranks

STATES = {
    "averaged": r"inside 'with ema\.swapped\(\)",
    "ahead": r"between backward and optimizer\.step\(\).*step='overlapped'",
    "given up": "one that was to be left out",
    "weights restored": "one that was to be left out",
    "in a round": "within a round|round of",
}
"""What a message says, for each of the states that the letters below are of."""


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@dataclass
class Run:
    """A model that has taken a step, what drives it, and its first checkpoint."""

    folder: Path
    model: Any
    optimizer: Any
    ema: Any

    @classmethod
    def of(cls, state: str, folder: Path) -> Run:
        model: Any = plain()
        optimizer: Any = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"offload": tz.Offload(step="backward")}
        if state == "in a round":
            options = {"diloco": tz.DiLoCo(sync_every=2), "mesh": tz.mesh(dp_replicate=2, dp_shard=1)}
        model, optimizer = tz.shard(model, optimizer, "zero3" if state == "in a round" else "zero3@cpu", **options)
        run = cls(folder, model, optimizer, None if state == "in a round" else tz.EMA(model))
        tz.checkpoint.save(folder / "before", model, optimizer)
        run.backward()
        optimizer.step()
        optimizer.zero_grad()
        return run

    @contextmanager
    def inside(self, state: str) -> Iterator[None]:
        if state == "averaged":
            with self.ema.swapped():
                yield
            return
        if state in ("ahead", "given up", "weights restored"):
            weights = self.model.state_dict()
            self.backward()
        if state in ("given up", "weights restored"):
            self.optimizer.zero_grad()
        if state == "weights restored":
            self.model.load_state_dict(weights)
        yield

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 3))

    def save(self, with_optimizer: bool) -> None:
        tz.checkpoint.save(self.folder / "after", self.model, self.optimizer if with_optimizer else None)

    def load(self, with_optimizer: bool) -> None:
        tz.checkpoint.load(self.folder / "before", self.model, self.optimizer if with_optimizer else None)

    def gather(self, write: Any) -> None:
        with tz.gathered(self.model, write=write):
            pass

    def swap(self) -> None:
        with self.ema.swapped():
            pass


# r: refused in the words of the state; d: done; n: refused for another reason, or there is no such thing
ACTS: dict[str, tuple[str, Callable[[Run], object]]] = {
    "optimizer.step()": ("rdrrd", lambda run: run.optimizer.step()),
    "optimizer.state_dict()": ("rrrrd", lambda run: run.optimizer.state_dict()),
    "optimizer.load_state_dict()": (
        "rrddd",
        lambda run: run.optimizer.load_state_dict({"state": {}, "param_groups": run.optimizer.param_groups}),
    ),
    "model.state_dict()": ("drrdd", lambda run: run.model.state_dict()),
    "tz.full_state_dict(model)": ("drrdd", lambda run: tz.full_state_dict(run.model)),
    "model.load_state_dict()": ("rrddr", lambda run: run.model.load_state_dict(plain().state_dict())),
    "all is saved": ("rrrrr", lambda run: run.save(True)),
    "weights are saved": ("drrdr", lambda run: run.save(False)),
    "all is loaded": ("rdddd", lambda run: run.load(True)),
    "weights are loaded": ("rrddd", lambda run: run.load(False)),
    "tz.gathered(model)": ("drrdd", lambda run: run.gather(False)),
    "tz.gathered(model, write=True)": ("rrrdd", lambda run: run.gather(True)),
    "tz.gathered(model, write='first rank')": ("rrrdr", lambda run: run.gather("first rank")),
    "p.norm()": ("drrdd", lambda run: run.model[0].weight.norm()),
    "a forward": ("drrdd", lambda run: run.evaluate()),
    "a forward and a backward": ("drrrd", lambda run: run.backward()),
    "tz.EMA(model)": ("nrrnn", lambda run: tz.EMA(run.model)),
    "ema.update()": ("rrrdn", lambda run: run.ema.update()),
    "ema.swapped()": ("rrrdn", lambda run: run.swap()),
}


@pytest.mark.parametrize("state", STATES)
def test_each_call_is_refused_where_the_table_says_so(state: str, tmp_path: Path) -> None:
    """Calls that are refused change nothing: all of them are made on one model. What is done gets a new one."""
    letters = {name: answers[[*STATES].index(state)] for name, (answers, _) in ACTS.items()}

    def body(rank: int) -> None:
        run = Run.of(state, tmp_path)
        with run.inside(state):
            for name in (name for name, letter in letters.items() if letter == "r"):
                print(name)
                with pytest.raises(tz.Misuse, match=STATES[state]):
                    ACTS[name][1](run)
        for name in (name for name, letter in letters.items() if letter == "d"):
            run = Run.of(state, tmp_path / name)
            with run.inside(state):
                ACTS[name][1](run)

    on_ranks(2, body, timeout_s=60.0)
