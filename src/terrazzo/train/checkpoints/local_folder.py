"""The folder of a run's local checkpoints on this host: where it is, whose it is, and what is in it.

It lies in `checkpoint.local.folder`, under a name that follows from where the run's durable checkpoints are. Nothing
here is collective.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from terrazzo import checkpoint
from terrazzo.config import Config
from terrazzo.engine.runtime.system import boot_id
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.files import replace_file

__all__ = [
    "ONE_HOST",
    "forget_run",
    "host_folder",
    "label",
    "local_checkpoints",
    "local_folder",
    "make_private",
    "newer_checkpoints",
    "note_run",
    "noted_run",
    "remove_all_but",
    "remove_complete_but",
    "remove_private",
    "run_and_step",
    "seen_as",
]

ONE_HOST = (
    "there is one host, and nobody to keep a copy for it. Start ranks on several, or set checkpoint.local.partner=auto,"
    " which keeps copies where there are."
)


# -- where it is ---------------------------------------------------------------------------------------------------


def local_folder(config: Config) -> str | None:
    """Where a run has them: no other run has the folder of its durable ones. None where it has none.

    Raises:
        BadInput: `checkpoint.local.folder` names a variable that the environment has not.
    """
    return None if config.checkpoint.local.folder is None else os.path.join(host_folder(config), _own_name(config))


def host_folder(config: Config) -> str:
    """`checkpoint.local.folder` on this host, as its environment has the variables that are in it."""
    expanded = os.path.expandvars(str(config.checkpoint.local.folder))
    if (missing := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise BadInput(
            f"checkpoint.local.folder is '{config.checkpoint.local.folder}', and {missing[1]} is not in the"
            " environment: set it on every host, or write the folder's path."
        )
    return expanded


def label(config: Config) -> str:
    """How all ranks call `local_folder`, whose path may differ between hosts."""
    return os.path.join(str(config.checkpoint.local.folder), _own_name(config))


def _own_name(config: Config) -> str:
    durable = config.checkpoint_folder
    where = durable if "://" in durable else os.path.realpath(durable)
    return f"terrazzo-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


def seen_as(top: str) -> str:
    """The same for ranks that see the same folder of the same machine."""
    try:
        status = os.stat(top)
    except OSError as error:
        return f"{boot_id()} {error.strerror}"
    return f"{boot_id() or platform.node()} {status.st_dev} {status.st_ino}"


# -- whose it is ---------------------------------------------------------------------------------------------------


def note_run(config: Config, run: str) -> None:
    """Say beside the durable checkpoints which run is at work, as long as it has saved none of them."""
    if (note := _note(config)) is not None:
        replace_file(note, run, sync=True)


def noted_run(config: Config) -> str:
    """The run that was last at work beside the durable checkpoints; empty where nothing says so."""
    note = _note(config)
    try:
        return "" if note is None else note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def forget_run(config: Config) -> None:
    """Remove the note."""
    if (note := _note(config)) is not None:
        note.unlink(missing_ok=True)


def _note(config: Config) -> Path | None:
    """Where the note is; None behind a URL."""
    return None if "://" in config.checkpoint_folder else Path(config.checkpoint_folder) / ".run"


def make_private(folder: str) -> None:
    """Make it unless it is there. Raises `OSError` unless it is this user's own then."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "it is a link, or others can write to it", folder)


def _is_private(folder: str) -> bool:
    """Whether it is there, no link, and nobody else can write to it."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o022


# -- what is in it -------------------------------------------------------------------------------------------------


def local_checkpoints(config: Config, durable: str | None) -> list[str]:
    """The paths of those on this host that are newer than the `durable` one, and of its run; oldest first.

    Where there is no durable one, or it cannot be read, the run is the one that was last at work there.
    """
    if (folder := local_folder(config)) is None:
        return []
    return newer_checkpoints(folder, *run_and_step(config, durable))


def run_and_step(config: Config, durable: str | None) -> tuple[str, int]:
    """The run whose local checkpoints may be gone on from, and the step that they must be newer than."""
    run = (_run_of(durable) if durable is not None else "") or noted_run(config)
    return run, 0 if durable is None else checkpoint.step_of(durable) or 0


def newer_checkpoints(folder: str, run: str, since: int) -> list[str]:
    """The paths of those in `folder` that are of `run`, and of steps behind `since`; oldest first."""
    newer = [path for path in _complete(folder) if (checkpoint.step_of(path) or 0) > since]
    return [path for path in newer if run and _run_of(path) == run]


def remove_all_but(folder: str, names: Collection[str | None]) -> None:
    """What was put aside, and what was not finished, goes too."""
    entries = [entry for entry in os.scandir(folder) if entry.name not in names]
    _remove([entry.path for entry in entries if entry.is_dir(follow_symlinks=False)])


def remove_complete_but(folder: str, names: Collection[str | None]) -> None:
    """Remove the complete checkpoints that have other names."""
    _remove([path for path in _complete(folder) if os.path.basename(path) not in names])


def remove_private(folder: str) -> None:
    """Remove the folder, with all that is in it, where it is this user's own."""
    _remove([folder] if _is_private(folder) else [])


def _remove(folders: Collection[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _complete(folder: str) -> list[str]:
    return checkpoint.complete_checkpoints(folder) if _is_private(folder) else []


def _run_of(path: str) -> str:
    """The run that has saved it; empty where that cannot be read."""
    try:
        return checkpoint.run_of(path)
    except TerrazzoError:
        return ""
