"""Reading a checkpoint on any number of ranks under any plan, by element ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from terrazzo.checkpoint.buffers import persistent_buffers
from terrazzo.checkpoint.exchange import agree
from terrazzo.checkpoint.manifest import MANIFEST, Manifest, OptimizerEntry, read_manifest, tensor_key
from terrazzo.checkpoint.rng import restore_rng
from terrazzo.checkpoint.weights import SafetensorsWeights
from terrazzo.engine import engine_of
from terrazzo.engine.optimizer import ShardedOptimizer
from terrazzo.errors import BadInput

__all__ = ["load", "load_weights"]


def load(path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Restore the state of a sharded model and its optimizer from the folder `path`; returns `extra`. Collective.

    World size and plan may differ from those that saved. The random generators are restored when the world size is the
    same. Everything that can be checked is checked on every rank before anything is changed.

    Raises:
        BadInput: the checkpoint is not complete, or does not fit the model or optimizer; all differences are listed.
    """
    path = Path(path)
    manifest = _checked(path, model, optimizer)
    reader = _Reader(path, manifest)
    engine_of(model).restore(reader.read)
    for buffer in persistent_buffers(model):
        read = (reader.read(name, "buffer", 0, buffer.tensor.numel()) for name in buffer.names)
        if (values := next((found for found in read if found is not None), None)) is not None:
            buffer.tensor.copy_(values.view(buffer.tensor.shape))
    if optimizer is not None and manifest.optimizer is not None:
        _restore_groups(optimizer, manifest.optimizer)
    if manifest.world_size == dist.get_world_size():
        restore_rng(manifest.ranks[dist.get_rank()]["rng"])
    return manifest.extra


def load_weights(model: torch.nn.Module, source: str | Path | Mapping[str, torch.Tensor]) -> None:
    """Load full weights into a (sharded) model, one tensor at a time.

    Args:
        source: a mapping of names to full tensors, a safetensors file, a folder of them, or a checkpoint's folder.

    Raises:
        BadInput: the files cannot be read. Missing, unexpected and misshapen names raise as in `load_state_dict`.
    """
    if isinstance(source, Mapping):
        model.load_state_dict(source)
    elif (Path(source) / MANIFEST).exists():
        model.load_state_dict(CheckpointWeights(Path(source), [buffer.names for buffer in persistent_buffers(model)]))
    else:
        model.load_state_dict(SafetensorsWeights(source))


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """The full weights and buffers in a checkpoint, put together one at a time.

    `shared` lists groups of names of one tensor: what is saved under one of them is found under all. Raises `BadInput`
    for a tensor that the manifest names and the files do not hold.
    """

    def __init__(self, path: Path, shared: Iterable[Sequence[str]] = ()) -> None:
        self._path, self._manifest = path, read_manifest(path)
        self._reader = _Reader(path, self._manifest)
        self._saved_as = {name: name for name in self._manifest.entries}
        for names in shared:
            saved = next((name for name in names if name in self._manifest.entries), None)
            if saved is not None:
                self._saved_as = {**dict.fromkeys(names, saved), **self._saved_as}

    def __getitem__(self, name: str) -> torch.Tensor:
        saved = self._saved_as[name]
        entry = self._manifest.entries[saved]
        kind = "buffer" if "buffer" in entry.states else "weight"
        numel = math.prod(entry.shape)
        values = self._reader.read(saved, kind, 0, numel)
        if numel == 0:
            return torch.empty(entry.shape)
        if values is None or values.numel() != numel:
            raise BadInput(
                f"The checkpoint '{self._path}' names {saved}, of {numel} elements, but does not hold all its values:"
                " it is damaged, use another one."
            )
        return values.view(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._saved_as  # the mixin's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.entries)

    def __len__(self) -> int:
        return len(self._manifest.entries)


class _Reader:
    """Reads element ranges; only the bytes asked for, from whichever files hold them."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements `start..stop` (flat, row-major) of a state, or None when it is not there."""
        entry = self._manifest.entries.get(name)
        if entry is None or kind not in entry.states:
            return None
        state = entry.states[kind]
        parts = [
            self._slice(self._manifest.files[file], tensor_key(name, kind, first), max(start, first) - first,
                        min(stop, last) - first)
            for first, last, file in state.ranges
            if first < stop and start < last
        ]  # fmt: skip
        if not parts:
            return torch.empty(0, dtype=getattr(torch, state.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slice(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        try:
            with safe_open(self._path / file, framework="pt") as opened:
                values: torch.Tensor = opened.get_slice(key)[start:stop]
        except (SafetensorError, OSError) as error:
            raise BadInput(f"The checkpoint file '{self._path / file}' cannot give '{key}': {error}.") from None
        if values.numel() != stop - start:
            raise BadInput(f"'{key}' in '{self._path / file}' is shorter than the manifest says.")
        return values


def _checked(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Manifest:
    """The manifest, once every rank has found that it fits. Raises the same `BadInput` on all ranks."""
    manifest, problem = None, None
    try:
        manifest = read_manifest(path)
        _check_fit(path, manifest, model, optimizer)
    except BadInput as error:
        problem = str(error)
    if (first := agree(problem)) is not None:
        raise BadInput(first)
    assert manifest is not None
    return manifest


def _check_fit(path: Path, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    saved = {name: entry.shape for name, entry in manifest.entries.items()}
    for buffer in persistent_buffers(model):
        names = [name for name in buffer.names if name in saved] or [buffer.name]
        shapes |= {name: list(buffer.tensor.shape) for name in names}
    problems = [f"missing: {name}" for name in sorted(set(shapes) - set(saved))]
    problems += [f"not in the model: {name}" for name in sorted(set(saved) - set(shapes))]
    for name in sorted(set(saved) & set(shapes)):
        if saved[name] != shapes[name]:
            problems.append(f"{name} is {saved[name]} in the checkpoint and {shapes[name]} in the model")
    for name, states in manifest.entries.items():
        numel = math.prod(states.shape)
        for kind, state in states.states.items():
            if kind in ("weight", "buffer") and numel and (not state.ranges or state.ranges[-1][1] != numel):
                problems.append(f"{name}, {kind}: not all of its {numel} elements are there")
    if optimizer is not None and manifest.optimizer is not None:
        problems += _optimizer_problems(optimizer, manifest.optimizer)
    if problems:
        raise BadInput(f"The checkpoint '{path}' does not fit this run: " + "; ".join(problems) + ".")


def _optimizer_problems(optimizer: torch.optim.Optimizer, saved: OptimizerEntry) -> list[str]:
    if type(optimizer).__name__ != saved.name:
        return [f"its optimizer is {saved.name}, this one is {type(optimizer).__name__}"]
    if len(optimizer.param_groups) != len(saved.groups):
        return [f"its optimizer has {len(saved.groups)} parameter groups, this one {len(optimizer.param_groups)}"]
    return []


def _restore_groups(optimizer: torch.optim.Optimizer, saved: OptimizerEntry) -> None:
    for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in values.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:  # JSON has no tuples
                group[key] = tuple(value) if isinstance(current, tuple) else value
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_scaler_state(saved.scaler)
