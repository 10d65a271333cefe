"""Writing a checkpoint: every rank its own ranges, rank 0 the manifest, all or nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from terrazzo.checkpoint import store
from terrazzo.checkpoint.buffers import persistent_buffers
from terrazzo.checkpoint.exchange import agree, gather_json
from terrazzo.checkpoint.manifest import MANIFEST, Entry, Manifest, OptimizerEntry, StateEntry, tensor_key
from terrazzo.checkpoint.rng import capture_rng
from terrazzo.engine import engine_of
from terrazzo.engine.optimizer import ShardedOptimizer
from terrazzo.errors import BadInput, Misuse

__all__ = ["save"]


@dataclass(frozen=True)
class _Range:
    """Elements `start..stop` of one state of one tensor, held by this rank."""

    name: str
    kind: str
    start: int
    stop: int
    shape: list[int]
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        """What ranks tell each other: the same label is the same content."""
        return f"{tensor_key(self.name, self.kind, self.start)}|{self.stop}"

    def described(self) -> dict[str, Any]:
        """Everything but the values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        described = {"name": self.name, "kind": self.kind, "start": self.start, "stop": self.stop}
        return {**described, "shape": self.shape, "dtype": dtype}


def save(
    path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any]
) -> None:
    """Write the state of a sharded model and its optimizer to the folder `path`. Collective.

    A state that several ranks hold is written once; buffers are written by rank 0. Memory: this rank's ranges are
    written from where they are; on CUDA they are copied to the host first. The folder must be on a file system that all
    ranks share.

    Args:
        path: the checkpoint's folder; it must not exist yet.
        extra: plain JSON values that `load` gives back, such as the step and the data cursor. Its `step` is noted in
            the manifest. The random generators of every rank are saved without being asked for.

    Raises:
        BadInput: `path` exists, or `extra` holds what JSON cannot.
        Misuse: a rank could not write its part; nothing is left behind under the name `path`.
    """
    path = Path(path)
    _check(path, extra)
    partial, is_first = store.partial_folder(path), dist.get_rank() == 0
    _together(path, (lambda: store.prepare(path)) if is_first else None)  # before anyone writes into it
    mine = _assigned(_held(model))
    file = f"rank-{dist.get_rank():05d}.safetensors"
    _together(path, lambda: _write_ranges(partial / file, mine))
    parts = gather_json({"ranges": [part.described() for part in mine], "rng": capture_rng()})

    def finish() -> None:
        store.write_text(partial / MANIFEST, _manifest(parts, model, optimizer, extra).model_dump_json())
        store.commit(partial, path)

    _together(path, finish if is_first else None)


def _check(path: Path, extra: dict[str, Any]) -> None:
    problem = None
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = f"extra holds a value that JSON cannot: {error}. Use numbers, text, lists and dicts."
    if path.exists():
        problem = f"The checkpoint '{path}' exists already and is not replaced: remove it or use another name."
    if (first := agree(problem)) is not None:
        raise BadInput(first)


def _together(path: Path, work: Callable[[], object] | None) -> None:
    """Run this rank's `work`, if it has any; raises `Misuse` on all ranks when it failed on one. Collective."""
    problem = None
    try:
        if work is not None:
            work()
    except Exception as error:  # whatever it was, the other ranks must not wait for this one
        problem = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    if (failed := agree(problem)) is not None:
        raise Misuse(f"The checkpoint '{path}' was not saved: {failed}.")


def _held(model: torch.nn.Module) -> list[_Range]:
    """Everything of the training state that this rank holds."""
    held = [
        _Range(piece.name, piece.kind, piece.start, piece.stop, list(piece.shape), piece.tensor)
        for piece in engine_of(model).pieces()
    ]
    for buffer in persistent_buffers(model):
        shape, numel = list(buffer.tensor.shape), buffer.tensor.numel()
        held.append(_Range(buffer.name, "buffer", 0, numel, shape, buffer.tensor.reshape(-1)))
    return held


def _assigned(held: list[_Range]) -> list[_Range]:
    """The part of `held` that this rank writes: holders of the same range take turns.

    Buffers are rank 0's: ranks may update them each for itself, and those of one module belong together.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, labels in enumerate(gather_json([part.label for part in held])):
        for label in labels:
            holders[label].append(rank)
    writer = {label: ranks[index % len(ranks)] for index, (label, ranks) in enumerate(holders.items())}
    return [part for part in held if (0 if part.kind == "buffer" else writer[part.label]) == dist.get_rank()]


def _write_ranges(file: Path, ranges: list[_Range]) -> None:
    tensors = {
        tensor_key(part.name, part.kind, part.start): part.tensor.detach().cpu().contiguous().clone() for part in ranges
    }
    save_file(tensors, file)
    store.sync(file)


def _manifest(
    parts: list[dict[str, Any]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
) -> Manifest:
    entries = {name: Entry(shape=list(value.shape), states={}) for name, value in model.named_parameters()}
    for rank, part in enumerate(parts):
        for piece in part["ranges"]:
            entry = entries.setdefault(piece["name"], Entry(shape=piece["shape"], states={}))
            state = entry.states.setdefault(piece["kind"], StateEntry(dtype=piece["dtype"], ranges=[]))
            state.ranges.append((piece["start"], piece["stop"], rank))
    for entry in entries.values():
        for state in entry.states.values():
            state.ranges.sort()
    return Manifest(
        step=int(extra.get("step", 0)),
        world_size=dist.get_world_size(),
        plan=str(engine_of(model).plan),
        files=[f"rank-{rank:05d}.safetensors" for rank in range(len(parts))],
        entries=entries,
        optimizer=None if optimizer is None else _optimizer_entry(optimizer),
        ranks=[{"rng": part["rng"]} for part in parts],
        extra=extra,
    )


def _optimizer_entry(optimizer: torch.optim.Optimizer) -> OptimizerEntry:
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    scaler = optimizer.scaler_state() if isinstance(optimizer, ShardedOptimizer) else {}
    return OptimizerEntry(name=type(optimizer).__name__, groups=groups, scaler=scaler)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
