"""What `terrazzo checkpoint prune` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from terrazzo.checkpoint import claim, complete_checkpoints
from terrazzo.checkpoint import prune as remove_old
from terrazzo.cli.shared.terminal import columns, say, say_json
from terrazzo.errors import BadInput

__all__ = ["run"]


def run(folder: str, keep: Mapping[str, Any], dry_run: bool, as_json: bool) -> None:
    """Remove all checkpoints of a folder but those to keep."""
    before = complete_checkpoints(folder)
    if not before:
        raise BadInput(f"'{folder}' holds no complete checkpoint: give the folder that holds the step-* folders.")
    lock = None if dry_run else claim(folder, f"terrazzo checkpoint prune, process {os.getpid()}")
    try:
        removed = remove_old(folder, **keep, dry_run=dry_run)
    finally:
        if lock is not None:
            lock.drop()
    kept = [name for path in before if (name := path.rpartition("/")[2]) not in removed]
    if as_json:
        say_json({"folder": folder, "dry_run": dry_run, "removed": removed, "kept": kept})
        return
    gone = "would be removed" if dry_run else "removed"
    say(columns(sorted([*([name, gone] for name in removed), *([name, "kept"] for name in kept)]), "<<"))
