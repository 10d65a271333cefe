"""What a checkpoint, or a folder of them, holds, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

from terrazzo.checkpoint.loading.load import check_foreign, open_source, own_folder
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.source import BESIDE_OPTIMIZER, BUFFER, WEIGHT, OptimizerInfo, Source, is_of_optimizer
from terrazzo.checkpoint.storage.places import open_store
from terrazzo.checkpoint.tensors import name_of
from terrazzo.engine.states.state_names import first_of, is_numbered
from terrazzo.errors import BadInput

__all__ = ["describe", "expand", "list_checkpoints", "lost", "tensors", "total_bytes"]

_LARGEST = 5


def describe(source: Source) -> dict[str, Any]:
    """Everything about a checkpoint but its tensors one by one; sizes are in bytes."""
    optimizer = source.optimizer
    return {
        "path": source.where,
        "format": source.format,
        "step": source.step,
        **source.about(),
        "size_bytes": total_bytes(source),
        "tensors": len(source.tensors),
        "parameters": sum(info.numel for info in source.tensors.values() if WEIGHT in info.states),
        "aliases": source.aliases,
        "states": _totals(source),
        "largest": sorted(tensors(source), key=lambda tensor: -tensor["size_bytes"])[:_LARGEST],
        "optimizer": None if optimizer is None else _optimizer(source, optimizer),
        "extra": source.extra,
        "notes": source.all_notes,
    }


def tensors(source: Source) -> list[dict[str, Any]]:
    """Every tensor: its name, shape and size, and of each of its states dtype and number of elements."""
    return [
        {
            "name": name,
            "shape": list(info.shape),
            "size_bytes": sum(state.numel * state.dtype.itemsize for state in info.states.values()),
            "states": {
                kind: {"dtype": name_of(state.dtype), "numel": state.numel} for kind, state in info.states.items()
            },
        }
        for name, info in source.tensors.items()
    ]


def total_bytes(source: Source, kind: str | None = None) -> int:
    """The bytes of all states, or of those of a kind; weights and buffers are one kind here."""
    kinds = {WEIGHT, BUFFER} if kind in (WEIGHT, BUFFER) else {kind}
    wanted = [total for total in _totals(source) if kind is None or total["kind"] in kinds]
    return sum(total["size_bytes"] for total in wanted)


def expand(path: str) -> list[str]:
    """`path`, or where that is a folder of checkpoints the paths of all of them, damaged ones too, by step.

    Raises:
        BadInput: there is nothing.
    """
    if own_folder(path) is not None:
        return [path]
    if names := sorted(open_store(path).candidates(), key=lambda name: (len(name), name)):
        return [f"{path.rstrip('/')}/{each}" for each in names]
    check_foreign(path)
    return [path]


def list_checkpoints(folder: str, paths: Sequence[str]) -> dict[str, Any]:
    """An entry for each of a folder's checkpoints; `problem` says why one cannot be used. Digests are not checked."""
    entries = [_entry(path) for path in paths]
    return {"path": folder, "checkpoints": entries, "unfinished": open_store(folder).unfinished()}


def lost(source: Source, to: str) -> list[str]:
    """What a conversion to `terrazzo`, `hf` or `dcp` leaves behind, a line each."""
    lines = source.all_notes
    if to != "terrazzo":
        kinds = {kind for info in source.tensors.values() for kind in info.states}
        lines += _lost_of_optimizer(source, kinds, to)
        lines += [words for kind, words in BESIDE_OPTIMIZER.items() if kind in map(first_of, kinds)]
        if source.extra:
            lines.append(f"extra: {', '.join(source.extra)}")
    if source.ranks:
        lines.append("the states of the ranks' random generators")
    return lines


def _lost_of_optimizer(source: Source, kinds: Set[str], to: str) -> Iterator[str]:
    if source.optimizer is None:
        return
    if to == "hf":
        yield "the optimizer's state"
        return
    if any(is_of_optimizer(kind) and is_numbered(kind) for kind in kinds):
        yield "the optimizer's states of all replicas but the first (DiLoCo)"
    if source.optimizer.scaler:
        yield "the counters of the loss scaler"


def _entry(path: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": path, "problem": None}
    try:
        folder = own_folder(path)
        source = open_source(path) if folder is None else TerrazzoCheckpoint(folder)
    except BadInput as error:
        return entry | {"problem": str(error)}
    entry |= {"format": source.format, "step": source.step, "metric": source.extra.get("metric")}
    if about := source.about():
        size = sum(file["size_bytes"] for file in about["files"])
        return entry | {key: about[key] for key in ("run", "written", "topology")} | {"size_bytes": size}
    return entry | {"size_bytes": total_bytes(source)}


def _totals(source: Source) -> list[dict[str, Any]]:
    """By kind of state and dtype how many tensors have it, and their elements and bytes."""
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for info in source.tensors.values():
        for kind, state in info.states.items():
            empty = {"kind": kind, "dtype": name_of(state.dtype), "tensors": 0, "numel": 0, "size_bytes": 0}
            total = totals.setdefault((kind, name_of(state.dtype)), empty)
            total["tensors"] += 1
            total["numel"] += state.numel
            total["size_bytes"] += state.numel * state.dtype.itemsize
    return sorted(totals.values(), key=lambda total: total["kind"] != WEIGHT)


def _optimizer(source: Source, optimizer: OptimizerInfo) -> dict[str, Any]:
    groups = []
    for group in optimizer.groups:
        names = group.get("params", [])
        numel = sum(source.tensors[name].numel for name in names if name in source.tensors)
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"tensors": len(names), "numel": numel, "settings": settings})
    return {"name": optimizer.name, "groups": groups, "scaler": optimizer.scaler}
