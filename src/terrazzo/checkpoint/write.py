"""Writing a checkpoint: every rank its own ranges, rank 0 the manifest, all or nothing."""

from __future__ import annotations

import json
from collections import defaultdict
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

    A state that several ranks hold is written once. Memory: this rank's ranges are written from where they are; on CUDA
    they are copied to the host first. The folder must be on a file system that all ranks share.

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
    partial = store.prepare(path) if dist.get_rank() == 0 else path.parent / f".{path.name}.partial"
    gather_json(None)  # the folder exists before anyone writes
    held = _held(model)
    mine = _assigned(held)
    file = f"rank-{dist.get_rank():05d}.safetensors"
    problem = _attempt(lambda: _write_ranges(partial / file, mine))
    if (failed := agree(problem)) is not None:
        raise Misuse(f"The checkpoint '{path}' was not saved: {failed}.")
    parts = gather_json({"ranges": [part.described() for part in mine], "rng": capture_rng()})
    if dist.get_rank() == 0:
        manifest = _manifest(parts, model, optimizer, extra)
        problem = _attempt(lambda: _commit(partial, path, manifest))
    if (failed := agree(problem)) is not None:
        raise Misuse(f"The checkpoint '{path}' was not saved: {failed}.")


def _check(path: Path, extra: dict[str, Any]) -> None:
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"extra holds a value that JSON cannot: {error}. Use numbers, text, lists and dicts.") from None
    if agree(f"'{path}' exists" if path.exists() else None):
        raise BadInput(f"The checkpoint '{path}' exists already and is not replaced: remove it or use another name.")


def _held(model: torch.nn.Module) -> list[_Range]:
    """Everything of the training state that this rank holds."""
    held = [
        _Range(piece.name, piece.kind, piece.start, piece.stop, list(piece.shape), piece.tensor)
        for piece in engine_of(model).pieces()
    ]
    for name, buffer in persistent_buffers(model).items():
        held.append(_Range(name, "buffer", 0, buffer.numel(), list(buffer.shape), buffer.reshape(-1)))
    return held


def _assigned(held: list[_Range]) -> list[_Range]:
    """The part of `held` that this rank writes: holders of the same range take turns."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, labels in enumerate(gather_json([part.label for part in held])):
        for label in labels:
            holders[label].append(rank)
    writer = {label: ranks[index % len(ranks)] for index, (label, ranks) in enumerate(holders.items())}
    return [part for part in held if writer[part.label] == dist.get_rank()]


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
    return OptimizerEntry(name=type(optimizer).__name__, groups=groups)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _commit(partial: Path, path: Path, manifest: Manifest) -> None:
    store.write_text(partial / MANIFEST, manifest.model_dump_json())
    store.commit(partial, path)


def _attempt(work: Any) -> str | None:
    """Run `work`; what went wrong with the disk, if anything, so that all ranks can be told."""
    try:
        work()
    except Exception as error:  # whatever it was, the other ranks must not wait for this one
        return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    return None
