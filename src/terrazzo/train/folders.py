"""The folders that a run makes: for its log, and inside it for swap files. `preflight` has looked at them before."""

from __future__ import annotations

import tempfile
from pathlib import Path

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.train.plan import build_offload, build_plan

__all__ = ["is_own", "make_log_folder", "make_swap_folders", "swap_folders"]


def make_log_folder(config: Config) -> None:
    """Make it, and write to it once. Called by one rank, before anything else is done."""
    folder = config.log.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
            file.flush()
    except OSError as error:
        raise BadInput(
            f"log.folder is '{folder}', which cannot be written to: {error.strerror}. Make it writable, or use another."
        ) from None


def swap_folders(config: Config) -> tuple[Path, ...]:
    """Where swap files go; none where no state is on nvme. Raises: `BadInput` where one is and no folder is named."""
    if not any("nvme" in place.shares for place in build_plan(config).places().values()):
        return ()
    folders = build_offload(config).folders
    if not folders:
        raise BadInput(
            "The plan places states on nvme, but offload.path names no folder for their swap files: set"
            " offload.path=FOLDER, on a local NVMe drive, or use the tier cpu."
        )
    return folders


def make_swap_folders(config: Config) -> None:
    """Make those that belong to the run itself, inside log.folder; all others have to be there."""
    for folder in swap_folders(config):
        if is_own(config, folder):
            folder.mkdir(parents=True, exist_ok=True)


def is_own(config: Config, folder: Path) -> bool:
    """Whether the run itself makes it, inside log.folder."""
    return folder.resolve().is_relative_to(config.log.folder.resolve())
