"""Which checkpoints of a run stay: old ones are removed, damaged and suspect ones renamed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.series.listing import complete_names
from terrazzo.checkpoint.storage.places import open_store, store_and_name
from terrazzo.checkpoint.storage.store import CheckpointStore, step_of
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count

__all__ = ["clear", "prune", "set_aside", "suspect", "suspects"]

_SUSPECT = "suspect"


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
    For one process, such as rank 0 of a run; what another one has removed meanwhile is no error.

    Args:
        keep_last: how many of the highest steps are kept.
        keep_every: also those whose step is a multiple of it.
        keep_best: also so many with the lowest `extra["metric"]`, of those whose `extra["evaluation"]`, which names
            what it was measured on, is that of the newest one with a metric.
        sure: also the newest that is not of a later step than this.
        run: only this run's; default: every run's.
        dry_run: return the names and remove nothing.

    Raises:
        BadInput: a number that is too small; or the folder cannot be seen, or none of its checkpoints is a step's.
    """
    if not is_count(keep_last):
        raise BadInput(f"keep_last is {keep_last}: keep one at least, or use terrazzo.checkpoint.clear.")
    if not (keep_every is None or is_count(keep_every)):
        raise BadInput(f"keep_every is {keep_every}: give a number of steps from 1 on, or None to keep none for it.")
    if not is_count(keep_best, least=0):
        raise BadInput(f"keep_best is {keep_best}: give 0, or how many of the best to keep.")
    store = open_store(folder)
    names = complete_names(store)
    if len(names) <= keep_last:
        return []  # without a look into any
    whole = [checkpoint for name in names if (checkpoint := _opened(store, name)) is not None]
    own = [checkpoint for checkpoint in whole if run is None or checkpoint.manifest.run == run]
    staying = {checkpoint.where for checkpoint in own[max(0, len(own) - keep_last) :]}
    staying |= {
        checkpoint.where for checkpoint in own if keep_every and not (step_of(checkpoint.where) or 0) % keep_every
    }
    staying |= {checkpoint.where for checkpoint in _best(own, keep_best)}
    if sure is not None:
        staying |= {each.where for each in [each for each in own if (step_of(each.where) or 0) <= sure][-1:]}
    gone = [checkpoint.where.rpartition("/")[2] for checkpoint in own if checkpoint.where not in staying]
    for name in gone if not dry_run else ():
        _remove(store, name)
    return gone


def clear(folder: str | os.PathLike[str]) -> list[str]:
    """Remove every complete checkpoint in `folder`, damaged too; returns their names. For one process, as `prune`."""
    store = open_store(folder)
    names = complete_names(store)
    for name in names:
        _remove(store, name)
    return names


def set_aside(path: str) -> str:
    """Rename a damaged checkpoint, so that its step can be saved again; returns its new name. For one process.

    Raises `BadInput` where there is none.
    """
    store, name = store_and_name(path)
    try:
        return store.set_aside(name)
    except FileNotFoundError:
        raise BadInput(f"There is no checkpoint '{path}': of the ranks of a run one is to set it aside.") from None


def suspect(folder: str | os.PathLike[str], *, after: int, run: str | None = None) -> list[str]:
    """Rename the complete checkpoints of steps behind `after`, so that nothing resumes from them.

    Returns the new names. They are whole, but what is in them may have been computed wrongly. Renamed back, they are as
    before. For one process: others miss in what they return what this one has renamed.

    Args:
        run: only this run's; default: every run's.
    """
    store = open_store(folder)
    names = [name for name in complete_names(store) if (step_of(name) or 0) > after]
    opened = {name: _opened(store, name) for name in names}
    wanted = [name for name, each in opened.items() if run is None or (each and each.manifest.run == run)]
    renamed = []
    for name in wanted:
        with contextlib.suppress(FileNotFoundError):  # another process has
            renamed.append(store.set_aside(name, _SUSPECT))
    return renamed


def suspects(folder: str | os.PathLike[str]) -> list[str]:
    """The names in `folder` that `suspect` has given."""
    return [name for name in open_store(folder).candidates() if f".{_SUSPECT}-" in name]


def _remove(store: CheckpointStore, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process has
        store.remove(name)


def _opened(store: CheckpointStore, name: str) -> TerrazzoCheckpoint | None:
    try:
        return TerrazzoCheckpoint(store.folder(name))
    except BadInput:
        return None


def _best(checkpoints: Sequence[TerrazzoCheckpoint], most: int) -> list[TerrazzoCheckpoint]:
    """The checkpoints with the lowest metrics, among those of the newest evaluation: two evaluations do not compare."""
    judged = [checkpoint for checkpoint in checkpoints if _metric(checkpoint) < math.inf]
    alike = [one for one in judged if one.extra.get("evaluation") == judged[-1].extra.get("evaluation")]
    return sorted(alike, key=_metric)[:most]


def _metric(checkpoint: TerrazzoCheckpoint) -> float:
    value = checkpoint.extra.get("metric")
    return float(value) if isinstance(value, int | float) else math.inf
