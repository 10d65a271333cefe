"""The folder of a run's local checkpoints on this host: where it is, which run's it is, and what is in it.

It is in `checkpoint.local.folder`, under a name derived from the folder of the run's durable checkpoints. Nothing here
is collective.
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
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.files import is_url, replace_file
from terrazzo.processes.system import boot_id

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
    """The folder of the run's local checkpoints, which no other run uses; None if it takes none.

    Raises:
        BadInput: `checkpoint.local.folder` has a variable that is not in the environment.
    """
    return None if config.checkpoint.local.folder is None else os.path.join(host_folder(config), _own_name(config))


def host_folder(config: Config) -> str:
    """`checkpoint.local.folder` on this host, with environment variables expanded."""
    expanded = os.path.expandvars(str(config.checkpoint.local.folder))
    if (missing := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise BadInput(
            f"checkpoint.local.folder is '{config.checkpoint.local.folder}', and {missing[1]} is not in the"
            " environment: set it on every host, or write the folder's path."
        )
    return expanded


def label(config: Config) -> str:
    """The name of `local_folder` in messages, the same on all ranks though paths may differ between hosts."""
    return os.path.join(str(config.checkpoint.local.folder), _own_name(config))


def _own_name(config: Config) -> str:
    durable = config.checkpoint_folder
    where = durable if is_url(durable) else os.path.realpath(durable)
    return f"terrazzo-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


def seen_as(top: str) -> str:
    """A string that is equal for ranks that see the same folder of the same machine."""
    try:
        status = os.stat(top)
    except OSError as error:
        return f"{boot_id()} {error.strerror}"
    return f"{boot_id() or platform.node()} {status.st_dev} {status.st_ino}"


# -- whose it is ---------------------------------------------------------------------------------------------------


def note_run(config: Config, run: str) -> None:
    """Note the run beside the durable checkpoints, for as long as it has saved none of them."""
    if (note := _note(config)) is not None:
        replace_file(note, run, sync=True)


def noted_run(config: Config) -> str:
    """The run that was noted last beside the durable checkpoints; empty if there is no note."""
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
    """The path of the note; None if the durable checkpoints are behind a URL."""
    return None if is_url(config.checkpoint_folder) else Path(config.checkpoint_folder) / ".run"


def make_private(folder: str) -> None:
    """Make the folder if it does not exist; raises `OSError` unless only this user can write to it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "it is a link, or others can write to it", folder)


def _is_private(folder: str) -> bool:
    """Whether it is an existing folder, not a link, that only this user can write to."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o022


# -- what is in it -------------------------------------------------------------------------------------------------


def local_checkpoints(config: Config, durable: str | None) -> list[str]:
    """The paths of local checkpoints on this host that are newer than the `durable` one, of its run; oldest first.

    If there is no durable one, or it cannot be read, the run is the one that was noted last.
    """
    if (folder := local_folder(config)) is None:
        return []
    return newer_checkpoints(folder, *run_and_step(config, durable))


def run_and_step(config: Config, durable: str | None) -> tuple[str, int]:
    """The run whose local checkpoints may be resumed from, and the step that they must be newer than."""
    run = (_run_of(durable) if durable is not None else "") or noted_run(config)
    return run, 0 if durable is None else checkpoint.step_of(durable) or 0


def newer_checkpoints(folder: str, run: str, since: int) -> list[str]:
    """The paths of checkpoints in `folder` of `run` and of steps after `since`; oldest first."""
    newer = [path for path in _complete(folder) if (checkpoint.step_of(path) or 0) > since]
    return [path for path in newer if run and _run_of(path) == run]


def remove_all_but(folder: str, names: Collection[str | None]) -> None:
    """Remove all folders with other names, also unfinished checkpoints and those put aside."""
    entries = [entry for entry in os.scandir(folder) if entry.name not in names]
    _remove([entry.path for entry in entries if entry.is_dir(follow_symlinks=False)])


def remove_complete_but(folder: str, names: Collection[str | None]) -> None:
    """Remove the complete checkpoints that have other names."""
    _remove([path for path in _complete(folder) if os.path.basename(path) not in names])


def remove_private(folder: str) -> None:
    """Remove the folder with its content, if it is private to this user."""
    _remove([folder] if _is_private(folder) else [])


def _remove(folders: Collection[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _complete(folder: str) -> list[str]:
    return checkpoint.complete_checkpoints(folder) if _is_private(folder) else []


def _run_of(path: str) -> str:
    """The run that saved a checkpoint; empty if that cannot be read."""
    try:
        return checkpoint.run_of(path)
    except TerrazzoError:
        return ""
