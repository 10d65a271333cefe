"""Which checkpoints of a run are in a place: by their names, oldest step first.

Order goes by step, never by time or by a file that says so: what is there is found by looking.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from terrazzo.checkpoint.format.manifest import MANIFEST
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.storage.places import open_store, store_and_name
from terrazzo.checkpoint.storage.store import CheckpointStore, is_aside, step_name, step_of
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count
from terrazzo.messages import listed

__all__ = ["complete_checkpoints", "complete_names", "latest", "run_of", "step_path"]


def step_path(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of `step` is kept. Raises `BadInput` for what is no number of steps."""
    if not is_count(step, least=0):
        raise BadInput(f"step is {step!r}: give the number of finished steps, an int from 0 on.")
    return f"{os.fspath(folder)}/{step_name(step)}"


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the complete checkpoints in `folder`, oldest step first. Other entries are ignored.

    Raises:
        BadInput: `folder` is a checkpoint itself, or has such as have other names than `step_path` gives, and no other.
    """
    return [f"{os.fspath(folder)}/{name}" for name in complete_names(open_store(folder))]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """The complete checkpoint of the highest step, if there is any. Its bytes are not checked.

    Raises `BadInput` as `complete_checkpoints`.
    """
    return next(reversed(complete_checkpoints(folder)), None)


def run_of(path: str) -> str:
    """What `save` was told of the run that has saved the checkpoint `path`, one of Terrazzo's own.

    Raises:
        Damaged: its manifest is not what was written.
        BadInput: it is of another version, or cannot be read.
    """
    store, name = store_and_name(path)
    return TerrazzoCheckpoint(store.folder(name)).manifest.run


def complete_names(store: CheckpointStore) -> list[str]:
    """The names of the complete checkpoints in `store`, oldest step first.

    Raises `BadInput` where there are others alone: a run that finds none begins anew.
    """
    names = store.names()
    by_step = {step: name for name in names if (step := step_of(name)) is not None}
    if not by_step:
        _check_none(store, [name for name in names if not is_aside(name)])
    return [by_step[step] for step in sorted(by_step)]


def _check_none(store: CheckpointStore, names: Sequence[str]) -> None:
    if names:
        raise BadInput(
            f"'{store.where}' has complete checkpoints, and none is named as the steps of a run are:"
            f" {listed(names, 8)}. Rename them as step_path has it, such as {step_name(100)}, name one to"
            " tz.checkpoint.load, or give another folder."
        )
    if store.itself().has(MANIFEST):
        raise BadInput(
            f"'{store.where}' is a checkpoint itself, expected the folder that it is in: give that, or load this one"
            " with tz.checkpoint.load(path, model, optimizer)."
        )
