"""The folders that a run makes: for its log, and in it for swap files. `preflight` has checked them before."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.files import is_url
from terrazzo.train.settings.plan import build_offload, build_plan

__all__ = ["absent_folders", "is_own", "make_log_folder", "make_swap_folders", "remove_empty", "swap_folders"]


def make_log_folder(config: Config) -> None:
    """Make the log folder, and write to it once. Called by one rank, before anything else is done."""
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


def absent_folders(config: Config) -> list[Path]:
    """The run's folders, and folders above them, that do not exist yet; the deepest first."""
    saved = config.checkpoint_folder
    wanted = [config.log.folder, *([] if is_url(saved) else [Path(saved)])]
    absent = {each for folder in wanted for each in (folder, *folder.parents) if not each.exists()}
    return sorted(absent, key=lambda each: len(each.parts), reverse=True)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the folders of a run that did not begin, unless something has been put there."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def swap_folders(config: Config) -> tuple[Path, ...]:
    """The folders of swap files; none if no state is on nvme. Raises `BadInput` if one is and no folder is named."""
    if not build_plan(config).on_disk:
        return ()
    folders = build_offload(config).folders
    if not folders:
        raise BadInput(
            "The plan places states on nvme, but offload.path names no folder for their swap files: set"
            " offload.path=FOLDER, on a local NVMe drive, or use the tier cpu."
        )
    return folders


def make_swap_folders(config: Config) -> None:
    """Make the folders of swap files that are in log.folder; all others must exist."""
    for folder in swap_folders(config):
        if is_own(config, folder):
            folder.mkdir(parents=True, exist_ok=True)


def is_own(config: Config, folder: Path) -> bool:
    """Whether a folder is in log.folder, so that the run makes it itself."""
    return folder.resolve().is_relative_to(config.log.folder.resolve())
