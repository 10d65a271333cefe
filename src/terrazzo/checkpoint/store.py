"""Checkpoint folders on disk: names, atomic commit, which one is newest, retention.

A checkpoint is written under a hidden name, flushed, and renamed when complete, so a folder that can be seen can be
read. The newest is found by looking, never from a file that says so. All functions here act on one rank.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from terrazzo.checkpoint.manifest import MANIFEST

__all__ = [
    "commit",
    "complete_checkpoints",
    "latest",
    "partial_folder",
    "prepare",
    "prune",
    "step_folder",
    "sync",
    "write_text",
]

_STEP = re.compile(r"step-([0-9]{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is kept."""
    return folder / f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest step first. Other entries are ignored."""
    if not folder.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, if there is any."""
    return next(reversed(complete_checkpoints(folder)), None)


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` complete checkpoints."""
    complete = complete_checkpoints(folder)
    for path in complete[: max(0, len(complete) - keep_last)]:
        (path / MANIFEST).unlink()  # first: what is half removed must not be taken for complete
        shutil.rmtree(path)


def partial_folder(path: Path) -> Path:
    """Where the checkpoint `path` is written until `commit` gives it its name."""
    return path.parent / f".{path.name}.partial"


def prepare(path: Path) -> Path:
    """Make the folder to write the checkpoint `path` into, empty."""
    partial = partial_folder(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, path: Path) -> None:
    """Give a completely written folder its name, durably."""
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
