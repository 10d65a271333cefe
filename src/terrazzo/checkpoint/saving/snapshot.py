"""What a save is of: this rank's ranges of a sharded model's state, and everything about the run beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.checkpoint.format.manifest import DTYPES, Manifest, head, index_space
from terrazzo.checkpoint.format.rank_layout import FileEntry, TilePlace, arrange
from terrazzo.checkpoint.format.seal import seal_of
from terrazzo.checkpoint.optimizers import Optimizers, check_optimizers, optimizer_name, presence, scaler_of
from terrazzo.checkpoint.rng import capture_rng
from terrazzo.checkpoint.saving.extra import check_extra, require_same_extra, text_problem
from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.checkpoint.source import BUFFER, WEIGHT
from terrazzo.checkpoint.storage.places import check_new, store_and_name
from terrazzo.checkpoint.tensors import bytes_of, name_of
from terrazzo.engine import (
    ModelState,
    Piece,
    TableRow,
    check_no_extra_state,
    collect_buffers,
    engine_of,
    parameter_table,
    persistent_buffers,
)
from terrazzo.engine.labels.label import Label, labelled
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.errors import BadInput
from terrazzo.exchange import broadcast_json, require_alike, together
from terrazzo.words import DTYPE_FIELDS

__all__ = ["Snapshot", "take"]


@dataclass(frozen=True)
class Snapshot:
    """A job, and what gives the live tensors that hold the bytes of its entries."""

    job: SaveJob
    tensors: dict[str, Callable[[], Tensor]]

    def entry_bytes(self, entry: FileEntry) -> memoryview:
        """The bytes of an entry, from where they are; from another device or from files, a copy."""
        return bytes_of(self.tensors[entry.key]())


@labelled(Label(Purpose.CHECKPOINT))
def take(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    extra: dict[str, Any],
    run: str,
) -> Snapshot:
    """Describe the state of now. Collective.

    Raises:
        BadInput: `path` exists, `extra` holds what JSON does not give back, a module has a state of its own beside
            parameters and buffers, or `optimizer` is not what steps the model.
        RanksApart: ranks give other values, an optimizer on some of them, or other names.
    """
    together(lambda: _check(path, extra, run), BadInput)
    store, name = store_and_name(path)
    require_alike({"the checkpoint's name": f"'{name}'", "run": repr(run), "optimizer": presence(optimizer)})
    require_same_extra(extra)
    together(lambda: check_no_extra_state(model), BadInput)
    together(lambda: check_optimizers(model, optimizer), BadInput)
    collect_buffers(model)
    listed = parameter_table(model)
    owned = _owned_entries(model, with_optimizer=optimizer is not None)
    nonce = broadcast_json(os.urandom(4).hex())
    is_first = dist.get_rank() == 0

    def describe() -> dict[str, Any] | None:
        _check_dtypes([entry for entry, _ in owned])
        if not is_first:
            return None
        groups = _optimizer(model, listed) if optimizer is not None else None
        return _common(model, listed, {"optimizer": groups, "extra": extra}, run)

    job = SaveJob(
        store=store.where,
        name=name,
        nonce=nonce,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        entries=arrange([entry for entry, _ in owned]),
        alone={"rng": capture_rng(), **_scaler_of_replica(model)},
        common=together(describe, BadInput),
    )
    return Snapshot(job, {entry.key: read for entry, read in owned})


def _check(path: str | os.PathLike[str], extra: dict[str, Any], run: str) -> None:
    check_new(path)
    seal_of(b"")  # a key that cannot be read is found before anything is written
    check_extra(extra)
    if (problem := text_problem(run)) is not None:
        raise BadInput(f"run {problem}.")


def _check_dtypes(entries: list[FileEntry]) -> None:
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise BadInput(
                f"{entry.name}, {entry.kind} is {entry.dtype}, which a checkpoint cannot hold: use a real dtype."
            )


def _owned_entries(model: torch.nn.Module, with_optimizer: bool) -> list[tuple[FileEntry, Callable[[], Tensor]]]:
    """Everything of the training state that this rank writes; of all ranks together each element comes once."""
    owned = [(_entry(piece), piece.read) for piece in ModelState(model).pieces(with_optimizer)]
    whole: dict[tuple[str, str], Tensor] = {}
    if dist.get_rank() == 0:  # ranks may update buffers each for itself, and those of one module belong together
        whole |= {(buffer.name, BUFFER): buffer.tensor for buffer in persistent_buffers(model)}
    axes = engine_of(model).axes
    if axes.is_first(axes.same_stage):
        none = [parameter for parameter in ModelState(model).parameters() if not parameter.numel]
        whole |= {(parameter.name, WEIGHT): torch.empty(parameter.shape, dtype=parameter.dtype) for parameter in none}
    return owned + [_whole(name, kind, tensor.detach()) for (name, kind), tensor in whole.items()]


def _entry(piece: Piece) -> FileEntry:
    space = index_space(piece.shape, piece.numel)
    tile = None if piece.tile.sizes == space else TilePlace(piece.tile.offsets, piece.tile.sizes)
    dtype = name_of(piece.dtype)
    return FileEntry(piece.name, piece.kind, piece.start, piece.stop, piece.shape, piece.numel, dtype, tile)


def _whole(name: str, kind: str, tensor: Tensor) -> tuple[FileEntry, Callable[[], Tensor]]:
    entry = FileEntry(name, kind, 0, tensor.numel(), tuple(tensor.shape), tensor.numel(), name_of(tensor.dtype))
    return entry, lambda: tensor.reshape(-1)


def _common(model: torch.nn.Module, listed: Sequence[TableRow], values: dict[str, Any], run: str) -> dict[str, Any]:
    engine, axes = engine_of(model), engine_of(model).axes
    names = [each.names for each in listed] + [tuple(buffer.names) for buffer in persistent_buffers(model)]
    common = {
        **head(run, values["extra"].get("step", 0)),
        "topology": {
            "world_size": dist.get_world_size(),
            "plan": {"name": engine.plan.name, **{state: str(place) for state, place in engine.plan.places().items()}},
            "mesh": {axis: axes.size([axis]) for axis in (*axes.within_replica, *axes.replica_axis)},
            "precision": {field: name_of(getattr(engine.precision, field)) for field in DTYPE_FIELDS},
        },
        "tensors": {each.name: list(each.shape) for each in listed},
        "aliases": {alias: first for first, *others in names for alias in others},
        **values,
    }
    try:
        json.dumps(common, allow_nan=False)
        Manifest(**{**common, "files": [], "tensors": {}, "ranks": []}).model_dump_json()  # as it will be written
    except (TypeError, ValueError) as error:
        raise BadInput(f"The optimizer has a hyper-parameter that JSON cannot hold: {error}.") from None
    return common


def _optimizer(model: torch.nn.Module, listed: Sequence[TableRow]) -> dict[str, Any]:
    engine = engine_of(model)
    groups = [
        {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [each.name for each in listed if each.group == number]}
        for number, group in engine.param_groups()
    ]
    scaler = scaler_of(model)
    return {"name": optimizer_name(model), "groups": groups, "scaler": scaler.scaler_state() if scaler else {}}


def _scaler_of_replica(model: torch.nn.Module) -> dict[str, Any]:
    """The loss scaler's counters where each replica trains by itself; else all ranks have those of the first."""
    axes, scaler = engine_of(model).axes, scaler_of(model)
    if not axes.replica_axis or scaler is None:
        return {}
    return {"replicas": axes.size(axes.replica_axis), "scaler": scaler.scaler_state()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
