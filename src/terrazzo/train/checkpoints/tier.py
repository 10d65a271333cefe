"""Checkpoints in memory, or on a drive, of the machine: taken more often than durable ones, and gone with the machine.

They are of the same format, in a folder of the run's own that goes by where its durable ones are. Whoever resumes takes
one that is newer than these, of the same run, and whole. There is one of them at most, but while it is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from terrazzo import checkpoint
from terrazzo.config import Config
from terrazzo.errors import SaveFailed, TerrazzoError
from terrazzo.exchange import on_first

__all__ = ["Tier", "noted_run", "survivors", "tier_folder"]


def tier_folder(config: Config) -> str | None:
    """Where a run has them: no other run has the folder of its durable ones. None where it has none."""
    if config.checkpoint.local.folder is None:
        return None
    durable = config.checkpoint_folder
    where = durable if "://" in durable else os.path.realpath(durable)
    name = f"terrazzo-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
    return os.path.join(config.checkpoint.local.folder, name)


def survivors(config: Config, durable: str | None) -> list[str]:
    """The paths of those that are newer than the `durable` one, and of its run; oldest first.

    Where there is none, or it cannot be read, the run is the one that was last at work there.
    """
    if (folder := tier_folder(config)) is None:
        return []
    run = (_run(durable) if durable is not None else "") or noted_run(config)
    since = 0 if durable is None else checkpoint.step_of(durable) or 0
    newer = [path for path in _complete(folder) if (checkpoint.step_of(path) or 0) > since]
    return [path for path in newer if run and _run(path) == run]


def noted_run(config: Config) -> str:
    """The run that was last at work beside the durable checkpoints; empty where nothing says so."""
    note = _note(config)
    try:
        return "" if note is None else note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


class Tier:
    """The folder of one run. Its methods are collective."""

    def __init__(self, config: Config) -> None:
        self._config, self._settings = config, config.checkpoint.local
        self._folder = tier_folder(config)
        self._run = ""

    def due(self, step: int) -> bool:
        """Whether one is to be taken after a step."""
        return self._folder is not None and step % self._settings.every == 0

    def save(self, model: nn.Module, optimizer: Any, extra: dict[str, Any], run: str) -> None:
        """In the place of the one that is there. Raises: `SaveFailed`."""
        folder = self._folder
        assert folder is not None
        path = checkpoint.step_path(folder, extra["step"])
        on_first(lambda: self._prepare(folder, run, path), SaveFailed)
        try:
            checkpoint.save(path, model, optimizer, extra, run=run)
        except SaveFailed as error:
            more = "It is one of checkpoint.local, whose folder needs room for two: use another, or null for none."
            raise SaveFailed(f"{error} {more}") from None
        on_first(lambda: _remove(_folders(folder, but=path)))

    def resumed(self, path: str) -> None:
        """The run goes on from there: steps that were taken since are taken again."""
        if (folder := self._folder) is not None:
            on_first(lambda: _remove([each for each in _complete(folder) if each != path]))

    def clear(self) -> None:
        """Remove all, and the folder."""
        if (folder := self._folder) is not None:
            on_first(lambda: _remove([folder] if _is_ours(folder) else []))

    def begin_anew(self) -> None:
        """There is no run whose checkpoints are here any more."""
        self.clear()
        if (note := _note(self._config)) is not None:
            on_first(lambda: note.unlink(missing_ok=True))

    def _prepare(self, folder: str, run: str, path: str) -> None:
        """Have a folder, a note of whose it is, and nothing at `path`."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            if not _is_ours(folder):
                raise PermissionError(errno.EPERM, "it is a link, or others can write to it", folder)
            if run != self._run and (note := _note(self._config)) is not None:
                part = note.with_name(f"{note.name}.{os.getpid()}")
                part.write_text(run, encoding="utf-8")
                part.replace(note)
            self._run = run
            if os.path.lexists(path):
                shutil.rmtree(path)
        except OSError as error:
            raise SaveFailed(
                f"The checkpoint '{path}' was not saved: {error.filename}: {error.strerror}. Use another"
                " checkpoint.local.folder, or null for none."
            ) from None


def _note(config: Config) -> Path | None:
    """Where it is said which run is at work, as long as it has saved no durable checkpoint; None behind a URL."""
    return None if "://" in config.checkpoint_folder else Path(config.checkpoint_folder) / ".run"


def _folders(folder: str, but: str) -> list[str]:
    """Those in it, what was put aside and what was not finished included."""
    return [entry.path for entry in os.scandir(folder) if entry.path != but and entry.is_dir(follow_symlinks=False)]


def _complete(folder: str) -> list[str]:
    return checkpoint.complete_checkpoints(folder) if _is_ours(folder) else []


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: str) -> bool:
    """Whether it is there, no link, and nobody else can write to it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _run(path: str) -> str:
    """The run that has saved it; empty where that cannot be read."""
    try:
        return checkpoint.run_of(path)
    except TerrazzoError:
        return ""
