"""Calls of all ranks: what each exchanges has its name, so that errors of ranks apart say at which calls these are."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import terrazzo as tz
from terrazzo.engine.comm.failed_exchanges import Exchange
from terrazzo.engine.comm.links import Links
from terrazzo.engine.interception.sharded_module import ShardedModule
from terrazzo.engine.interception.sharded_optimizer import ShardedOptimizer
from terrazzo.engine.labels.declared_calls import DECLARED_CALLS
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from tests.engine.toys import Net, adamw, batch, loss_of, on_ranks, sharded

Act = Callable[[Any, Any, Path], Any]


def average(model: Any, optimizer: Any, folder: Path) -> None:
    ema = tz.EMA(model)
    ema.update()
    with ema.swapped():
        pass


def attach(model: Any, optimizer: Any, folder: Path) -> None:
    other, _ = tz.shard(Net(), None, "zero3")
    tz.attach(other, adamw(other.parameters()))


def write(model: Any, optimizer: Any, folder: Path) -> None:
    for how in (True, "first rank"):
        with tz.gathered(model, write=how):  # type: ignore[arg-type]
            pass


def save_and_load(model: Any, optimizer: Any, folder: Path) -> None:
    with tz.checkpoint.Saver(model, optimizer) as saver:
        saver.save(folder / "beside", {"step": 1})
    tz.checkpoint.save(folder / "saved", model, optimizer)
    tz.checkpoint.load(folder / "saved", model, optimizer)


def pretrained(model: Any, optimizer: Any, folder: Path) -> None:
    tz.save_pretrained(model, folder / "hub", config={"model_type": "net", "architectures": ["Net"]})


def take_a_step(model: Any, optimizer: Any, folder: Path) -> None:
    with tz.accumulate(model):
        loss_of(model, batch()).backward()
    loss_of(model, batch()).backward()
    tz.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()


def states(model: Any, optimizer: Any, folder: Path) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_scaler_state(optimizer.scaler_state())
    tz.full_state_dict(model)


def load_weights(model: Any, optimizer: Any, folder: Path) -> None:
    tz.checkpoint.load_weights(model, {name: torch.zeros_like(value) for name, value in model.state_dict().items()})


ACTS: list[Act] = [average, attach, write, save_and_load, pretrained, take_a_step, states, load_weights]
ACTS += [lambda model, optimizer, folder: tz.checkpoint.check_replicas(model)]
TRIED = {
    *("EMA", "attach", "shard", "gathered", "accumulate", "clip_grad_norm_", "full_state_dict", "save_pretrained"),
    *("checkpoint.save", "checkpoint.load", "checkpoint.Saver", "checkpoint.check_replicas", "checkpoint.load_weights"),
    *("EMA.update", "EMA.swapped", "EMA.decay"),
    *("ShardedModule.zero_grad", "ShardedModule.state_dict", "ShardedModule.load_state_dict"),
    *("ShardedOptimizer.zero_grad", "ShardedOptimizer.scaler_state", "ShardedOptimizer.load_scaler_state"),
    *("ShardedOptimizer.state_dict", "ShardedOptimizer.load_state_dict"),
}
"""Of the calls below, those that `ACTS` make."""
OTHERS = {
    "checkpoint.load_newest": "loads and saves",
    **dict.fromkeys(("fully_shard", "initialize"), "call tz.shard, and objects with names of other libraries' calls"),
    **dict.fromkeys(("parallelize", "step", "Pipeline"), "of meshes with other axes"),
    **dict.fromkeys(("DiLoCo", "LossScaling", "Offload", "Place", "Plan", "Precision", "plan"), "exchange nothing"),
    **dict.fromkeys(("mesh", "register_forward_method", "__version__"), "exchange nothing that the engine knows"),
    **{
        f"checkpoint.{name}": "of files"
        for name in (
            *("Resumed", "Source", "claim", "clear", "complete_checkpoints", "latest", "open_source", "prune"),
            *("run_of", "set_aside", "step_of", "step_path", "suspect", "suspects"),
        )
    },
    **dict.fromkeys(("ShardedModule.no_sync", "ShardedModule.set_gradient_denominator"), "exchange nothing"),
    **{
        f"ShardedOptimizer.{name}": "exchanges nothing"
        for name in (
            *("state", "skipped_steps", "loss_scale", "add_param_group", "states"),
            *("register_step_pre_hook", "register_step_post_hook"),
        )
    },
}
"""Why those are not tried that `ACTS` do not make."""


NOT_MADE = {"tz.parallelize(model, mesh)", "tz.step(model, micro_batches, loss_fn)"}
"""Declared calls that `ACTS` do not make: of meshes with other axes."""


def public_calls() -> set[str]:
    """What is public, but for errors and modules."""
    of_modules = {"": tz, "checkpoint.": tz.checkpoint}
    found = {f"{prefix}{name}": getattr(each, name) for prefix, each in of_modules.items() for name in each.__all__}
    for kind in (tz.EMA, ShardedModule, ShardedOptimizer):
        found |= {f"{kind.__name__}.{name}": each for name, each in vars(kind).items() if not name.startswith("_")}
    return {
        name
        for name, each in found.items()
        if not isinstance(each, types.ModuleType) and not (isinstance(each, type) and issubclass(each, Exception))
    }


def test_each_public_call_is_tried_here_or_needs_no_name() -> None:
    assert public_calls() == {*TRIED, *OTHERS}, "one that exchanges belongs into ACTS"


@contextmanager
def begun() -> Iterator[tuple[set[str], set[str]]]:
    """Notes where an exchange begins that nothing has named, and which calls name one."""
    unnamed, calls, begin = set[str](), set[str](), Links.begin

    def noting(links: Links, label: Label) -> Exchange:
        if replace(label, model=0) == Label():
            here = [each for each in traceback.extract_stack() if "/terrazzo/" in each.filename]
            unnamed.add(" < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in here[::-1][2:8]))
        if label.purpose is Purpose.CALL:
            calls.add(str(label))
        return begin(links, label)

    with mock.patch.object(Links, "begin", noting):
        yield unnamed, calls


def test_what_public_calls_exchange_has_a_name(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for number, act in enumerate(ACTS):
            model, optimizer = sharded(Net(), "hybrid_shard", 4, precision="fp16")
            loss_of(model, batch(0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            act(model, optimizer, folder)

    with begun() as (unnamed, calls):
        on_ranks(4, body)
    assert not unnamed
    assert {call.text for call in DECLARED_CALLS.values()} == {*calls, *NOT_MADE}
