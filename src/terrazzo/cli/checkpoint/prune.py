"""`terrazzo checkpoint prune`: removes all checkpoints of a folder but those to keep."""

from __future__ import annotations

import os
from typing import NamedTuple

from terrazzo.checkpoint import claim, complete_checkpoints, prune
from terrazzo.cli.shared.terminal import columns, say, say_json
from terrazzo.errors import BadInput

__all__ = ["KeptCheckpoints", "prune_folder"]


class KeptCheckpoints(NamedTuple):
    """Which checkpoints of a folder are kept.

    Attributes:
        keep_last: how many of the highest steps.
        keep_every: also those whose step is a multiple of it.
        keep_best: also so many with the lowest validation loss.
        run: prune only the checkpoints of the run of this name; None for all runs.
    """

    keep_last: int
    keep_every: int | None
    keep_best: int
    run: str | None


def prune_folder(folder: str, wanted: KeptCheckpoints, dry_run: bool, as_json: bool) -> None:
    """Remove all checkpoints of a folder but those that are `wanted`."""
    before = complete_checkpoints(folder)
    if not before:
        raise BadInput(f"'{folder}' holds no complete checkpoint: give the folder that holds the step-* folders.")
    lock = None if dry_run else claim(folder, f"terrazzo checkpoint prune, process {os.getpid()}")
    try:
        removed = prune(folder, **wanted._asdict(), dry_run=dry_run)
    finally:
        if lock is not None:
            lock.drop()
    remaining = [name for path in before if (name := path.rpartition("/")[2]) not in removed]
    if as_json:
        say_json({"folder": folder, "dry_run": dry_run, "removed": removed, "kept": remaining})
        return
    gone = "would be removed" if dry_run else "removed"
    say(columns(sorted([*([name, gone] for name in removed), *([name, "kept"] for name in remaining)]), "<<"))
