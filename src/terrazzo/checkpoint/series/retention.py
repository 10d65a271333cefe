"""The checkpoints of a run in one place: their names, which is newest, which are kept, and resuming from a good one.

Order goes by step, never by time or by a file that says so: what is there is found by looking.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.checkpoint.loading.load import restore
from terrazzo.checkpoint.loading.native import Checkpoint
from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.storage.local import LocalStore
from terrazzo.checkpoint.storage.lock import Lock
from terrazzo.checkpoint.storage.places import open_store, store_and_name
from terrazzo.checkpoint.storage.store import CheckpointFolder, CheckpointStore, step_name, step_of
from terrazzo.errors import BadInput, Damaged, Misuse
from terrazzo.exchange import gather_json, on_first, patiently, together

__all__ = [
    "Resumed",
    "claim",
    "clear",
    "complete_checkpoints",
    "latest",
    "load_newest",
    "prune",
    "run_of",
    "set_aside",
    "step_path",
    "suspect",
    "suspects",
]

_PATIENCE_S = 30.0  # shared file systems show a new folder late


def step_path(folder: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of `step` is kept."""
    return f"{os.fspath(folder)}/{step_name(step)}"


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The paths of the complete checkpoints in `folder`, oldest step first. Other entries are ignored."""
    return [f"{os.fspath(folder)}/{name}" for name in _names(open_store(folder))]


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
    return Checkpoint(store.folder(name)).manifest.run


def prune(  # structure: signature fixed by what may be kept
    folder: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int = 0,
    sure: int | None = None,
    run: str | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Remove all complete checkpoints but those to keep; returns the names of the removed, oldest step first.

    Those of other formats and other runs are left out, and damaged ones as far as that shows without reading tensors:
    their bytes `load_newest` checks, and renames what it refuses. Of those that are kept at least one opens.

    Args:
        keep_last: how many of the highest steps are kept.
        keep_every: also those whose step is a multiple of it.
        keep_best: also so many with the lowest `extra["metric"]`, of those whose `extra["evaluation"]`, which names
            what it was measured on, is that of the newest one with a metric.
        sure: also the newest that is not of a later step than this.
        run: only this run's; default: every run's.
        dry_run: return the names and remove nothing.

    Raises:
        BadInput: a number that is too small; or the folder cannot be seen.
    """
    if keep_last < 1:
        raise BadInput(f"keep_last is {keep_last}: keep one at least, or use terrazzo.checkpoint.clear.")
    if keep_every is not None and keep_every < 1:
        raise BadInput(f"keep_every is {keep_every}: give a number of steps from 1 on, or None to keep none for it.")
    if keep_best < 0:
        raise BadInput(f"keep_best is {keep_best}: give 0, or how many of the best to keep.")
    store = open_store(folder)
    found = [checkpoint for name in _names(store) if (checkpoint := _opened(store, name)) is not None]
    own = [checkpoint for checkpoint in found if run is None or checkpoint.manifest.run == run]
    kept = {checkpoint.where for checkpoint in own[max(0, len(own) - keep_last) :]}
    kept |= {checkpoint.where for checkpoint in own if keep_every and not (step_of(checkpoint.where) or 0) % keep_every}
    kept |= {checkpoint.where for checkpoint in _best(own, keep_best)}
    kept |= {each.where for each in [each for each in own if (step_of(each.where) or 0) <= (sure or -1)][-1:]}
    gone = [checkpoint.where.rpartition("/")[2] for checkpoint in own if checkpoint.where not in kept]
    for name in gone if not dry_run else ():
        store.remove(name)
    return gone


def claim(folder: str | os.PathLike[str], owner: str) -> Lock | None:
    """Keep other runs from saving in `folder` for as long as this process lives; None behind a URL.

    Raises:
        BadInput: another run has it; the message says what its `owner` was. Or it cannot be written to.
    """
    store = open_store(folder)
    if not isinstance(store, LocalStore):
        return None
    lock = Lock(store.root / ".lock")
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        taken = lock.take(owner)
    except OSError as error:
        raise BadInput(
            f"Checkpoints cannot be saved in '{store.where}': {error.strerror}. Make the folder writable, or name"
            " another."
        ) from None
    if taken is False:
        raise BadInput(
            f"Another run saves in '{store.where}': {lock.holder()}. Wait for it, or give this run another folder."
        )
    return lock


def clear(folder: str | os.PathLike[str]) -> None:
    """Remove every complete checkpoint in `folder`, damaged ones too."""
    store = open_store(folder)
    for name in _names(store):
        store.remove(name)


def set_aside(path: str) -> str:
    """Rename a damaged checkpoint, so that its step can be saved again; returns its new name."""
    store, name = store_and_name(path)
    return store.set_aside(name)


def suspect(folder: str | os.PathLike[str], *, after: int, run: str | None = None) -> list[str]:
    """Rename the complete checkpoints of steps behind `after`, so that nothing resumes from them.

    Returns the new names. They are whole, but what is in them may have been computed wrongly. Renamed back, they are as
    before.

    Args:
        run: only this run's; default: every run's.
    """
    store = open_store(folder)
    names = [name for name in _names(store) if (step_of(name) or 0) > after]
    opened = {name: _opened(store, name) for name in names}
    wanted = [name for name, found in opened.items() if run is None or (found and found.manifest.run == run)]
    return [store.set_aside(name, _SUSPECT) for name in wanted]


def suspects(folder: str | os.PathLike[str]) -> list[str]:
    """The names in `folder` that `suspect` has given."""
    return [name for name in open_store(folder).candidates() if f".{_SUSPECT}-" in name]


_SUSPECT = "suspect"


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
        BadInput: the newest whole one does not fit, or one cannot be read, which proves no damage.
    """
    beside = besides or {}
    found = together(lambda: [*complete_checkpoints(folder), *beside], BadInput)
    paths: Sequence[str] = gather_json(found)[0]  # the first rank decides: others may lag
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
            said = _set_refused_aside(refused)
            return Resumed(path, opened.extra, manifest.run, manifest.topology.world_size, generators, said)
    if refused:
        raise Damaged("No checkpoint is whole. " + " ".join(f"{path}: {why}" for path, why in refused.items()))
    return None


def _names(store: CheckpointStore) -> list[str]:
    found = {step: name for name in store.names() if (step := step_of(name)) is not None}
    return [found[step] for step in sorted(found)]


def _open_beside(folder: CheckpointFolder) -> Checkpoint:
    return together(lambda: Checkpoint(folder), Misuse)


def _open_together(path: str) -> Checkpoint:
    """Open what the first rank sees; others wait for it to come into sight, and say when it does not."""
    store, name = store_and_name(path)
    seen = on_first(lambda: store.occupied(name), Misuse)
    deadline = time.monotonic() + _PATIENCE_S

    def work() -> Checkpoint:
        while seen and not store.occupied(name) and time.monotonic() < deadline:
            time.sleep(0.1)
        return Checkpoint(store.folder(name))

    return together(work, Misuse)


def _set_refused_aside(refused: dict[str, str]) -> dict[str, str]:
    """Have the first rank do it, and say where they are now behind the reasons. Collective where there are any."""
    is_first = dist.get_rank() == 0

    def work() -> dict[str, str]:
        return {path: f"{why} {_moved(path)}".rstrip() for path, why in refused.items()} if is_first else {}

    texts: dict[str, str] = gather_json(patiently(work, Misuse))[0] if refused else {}  # some stores copy to rename
    return texts


def _moved(path: str) -> str:
    store, name = store_and_name(path)
    try:
        if not store.occupied(name):  # its parts are on other hosts
            return ""
        return f"It is '{set_aside(path)}' now."
    except Exception as error:  # of whatever kind the store has: a run that only reads may go on
        return f"It was left under its name ({error}): rename it before anything is saved or removed here."


def _opened(store: CheckpointStore, name: str) -> Checkpoint | None:
    try:
        return Checkpoint(store.folder(name))
    except BadInput:
        return None


def _best(found: Sequence[Checkpoint], most: int) -> list[Checkpoint]:
    """Those with the lowest metrics of the newest evaluation: of two of them metrics say nothing about each other."""
    judged = [checkpoint for checkpoint in found if _metric(checkpoint) < math.inf]
    alike = [one for one in judged if one.extra.get("evaluation") == judged[-1].extra.get("evaluation")]
    return sorted(alike, key=_metric)[:most]


def _metric(checkpoint: Checkpoint) -> float:
    value = checkpoint.extra.get("metric")
    return float(value) if isinstance(value, int | float) else math.inf
