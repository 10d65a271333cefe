"""A run that goes on: from its newest checkpoint that is whole, back past damaged ones."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.checkpoint.loading.load import restore
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.series.listing import complete_checkpoints
from terrazzo.checkpoint.series.retention import set_aside
from terrazzo.checkpoint.storage.places import store_and_name
from terrazzo.checkpoint.storage.store import CheckpointFolder, step_of
from terrazzo.errors import BadInput, Damaged, Misuse
from terrazzo.exchange import broadcast_json, on_first, patiently, together

__all__ = ["Resumed", "load_newest"]

_PATIENCE_S = 30.0  # shared file systems show a new folder late


@dataclass(frozen=True)
class Resumed:
    """What a run continues from: `extra` as it was given to `save`, and the run and world size that saved.

    `generators` says whether the random generators continue as well: where ranks are as many as they were. `refused`
    says of each newer checkpoint, by the path that it had, why it was not used and what its name is now.
    """

    path: str
    extra: dict[str, Any]
    run: str
    world_size: int
    generators: bool
    refused: dict[str, str]


def load_newest(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    cast: bool = False,
    besides: Mapping[str, CheckpointFolder] | None = None,
) -> Resumed | None:
    """Restore the newest checkpoint that is whole, going back past damaged ones; None where there is none. Collective.

    What it returns has `extra` in it, which is all that `load` returns: there the caller has named the checkpoint, here
    it has to be said which one it was.

    Rank 0 renames the damaged ones as `set_aside` does, unless none is whole: `prune` must not count them, and the run
    may come to their steps again. What is only to be looked at is read by `load(latest(folder), ...)`, which writes
    nothing.

    Args:
        besides: by its path, how each of further checkpoints is read, which are the same on every rank; of one step
            that in `folder` comes first.

    Raises:
        Damaged: there are checkpoints, and none is whole; the message has the reason for each.
        BadInput: the newest whole one does not fit, or one cannot be read, which proves no damage; or `folder` is a
            checkpoint itself, or has such as have no step's name, and no other.
    """
    beside = besides or {}
    seen = together(lambda: [*complete_checkpoints(folder), *beside], BadInput)
    paths: Sequence[str] = broadcast_json(seen)  # the first rank decides: others may lag
    refused: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: step_of(path) or 0, reverse=True):
        try:
            opened = _open_beside(beside[path]) if path in beside else _open_together(path)
            restore(opened, model, optimizer, cast=cast)
        except Damaged as error:
            refused[path] = str(error)
        else:
            manifest = opened.manifest
            generators = len(opened.ranks) == dist.get_world_size()
            reasons = _set_refused_aside(refused)
            return Resumed(path, opened.extra, manifest.run, manifest.topology.world_size, generators, reasons)
    if refused:
        raise Damaged("No checkpoint is whole. " + " ".join(f"{path}: {why}" for path, why in refused.items()))
    return None


def _open_beside(folder: CheckpointFolder) -> TerrazzoCheckpoint:
    return together(lambda: TerrazzoCheckpoint(folder), Misuse)


def _open_together(path: str) -> TerrazzoCheckpoint:
    """Open what the first rank sees; others wait for it to come into sight, and say when it does not."""
    store, name = store_and_name(path)
    seen = on_first(lambda: store.occupied(name), Misuse)
    deadline = time.monotonic() + _PATIENCE_S

    def work() -> TerrazzoCheckpoint:
        while seen and not store.occupied(name) and time.monotonic() < deadline:
            time.sleep(0.1)
        return TerrazzoCheckpoint(store.folder(name))

    return together(work, Misuse)


def _set_refused_aside(refused: dict[str, str]) -> dict[str, str]:
    """Have the first rank do it, and say where they are now behind the reasons. Collective where there are any."""
    is_first = dist.get_rank() == 0

    def work() -> dict[str, str]:
        return {path: f"{why} {_moved(path)}".rstrip() for path, why in refused.items()} if is_first else {}

    texts: dict[str, str] = broadcast_json(patiently(work, Misuse)) if refused else {}  # some stores copy to rename
    return texts


def _moved(path: str) -> str:
    store, name = store_and_name(path)
    try:
        if not store.occupied(name):  # its parts are on other hosts
            return ""
        return f"It is '{set_aside(path)}' now."
    except Exception as error:  # of whatever kind the store has: a run that only reads may go on
        return f"It was left under its name ({error}): rename it before anything is saved or removed here."
