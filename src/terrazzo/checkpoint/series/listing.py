"""Which checkpoints of a run are in a place: by their names, oldest step first.

Order goes by step, never by time or by a file that says so: what is there is found by looking.
"""

from __future__ import annotations

import os

from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.storage.places import open_store, store_and_name
from terrazzo.checkpoint.storage.store import CheckpointStore, step_name, step_of

__all__ = ["complete_checkpoints", "complete_names", "latest", "run_of", "step_path"]


def step_path(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of `step` is kept."""
    return f"{os.fspath(folder)}/{step_name(step)}"


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the complete checkpoints in `folder`, oldest step first. Other entries are ignored."""
    return [f"{os.fspath(folder)}/{name}" for name in complete_names(open_store(folder))]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """The complete checkpoint of the highest step, if there is any. Its bytes are not checked."""
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
    """The names of the complete checkpoints in `store`, oldest step first."""
    by_step = {step: name for name in store.names() if (step := step_of(name)) is not None}
    return [by_step[step] for step in sorted(by_step)]
