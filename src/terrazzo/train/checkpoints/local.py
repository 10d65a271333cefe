"""Local checkpoints: in memory, or on a drive, of each host, taken more often than durable ones, and gone with it.

They are of the same format, in a folder of the run's own that goes by where its durable ones are. Whoever resumes takes
one that is newer than these, of the same run, and whole. There is one of them at most, but while it is replaced. Of
several hosts each has its own ranks' part, and a copy of another's, so that one of them may be lost.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from terrazzo import checkpoint
from terrazzo.checkpoint.saving.save import save_spread
from terrazzo.checkpoint.storage.places import store_and_name
from terrazzo.checkpoint.storage.store import Folder
from terrazzo.checkpoint.upkeep.partners import Copied, Partners
from terrazzo.config import Config
from terrazzo.engine.runtime.system import boot_id
from terrazzo.errors import BadInput, SaveFailed, TerrazzoError
from terrazzo.exchange import gather_json, on_first, together
from terrazzo.hosts import Hosts

__all__ = ["ONE_HOST", "LocalCheckpoints", "host_folder", "local_checkpoints", "local_folder", "noted_run"]

ONE_HOST = (
    "there is one host, and nobody to keep a copy for it. Start ranks on several, or set checkpoint.local.partner=auto,"
    " which keeps copies where there are."
)


def local_folder(config: Config) -> str | None:
    """Where a run has them: no other run has the folder of its durable ones. None where it has none.

    Raises:
        BadInput: `checkpoint.local.folder` names a variable that the environment has not.
    """
    return None if config.checkpoint.local.folder is None else os.path.join(host_folder(config), _own_name(config))


def host_folder(config: Config) -> str:
    """`checkpoint.local.folder` on this host, as its environment has the variables that are in it."""
    found = os.path.expandvars(str(config.checkpoint.local.folder))
    if (missing := re.search(r"\$\{?(\w+)", found)) is not None:
        raise BadInput(
            f"checkpoint.local.folder is '{config.checkpoint.local.folder}', and {missing[1]} is not in the"
            " environment: set it on every host, or write the folder's path."
        )
    return found


def _own_name(config: Config) -> str:
    durable = config.checkpoint_folder
    where = durable if "://" in durable else os.path.realpath(durable)
    return f"terrazzo-{os.getuid()}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


def local_checkpoints(config: Config, durable: str | None) -> list[str]:
    """The paths of those on this host that are newer than the `durable` one, and of its run; oldest first.

    Where there is none, or it cannot be read, the run is the one that was last at work there.
    """
    if (folder := local_folder(config)) is None:
        return []
    run, since = _wanted(config, durable)
    newer = [path for path in _complete(folder) if (checkpoint.step_of(path) or 0) > since]
    return [path for path in newer if run and _run(path) == run]


def _wanted(config: Config, durable: str | None) -> tuple[str, int]:
    """Of which run, and newer than which step."""
    run = (_run(durable) if durable is not None else "") or noted_run(config)
    return run, 0 if durable is None else checkpoint.step_of(durable) or 0


def noted_run(config: Config) -> str:
    """The run that was last at work beside the durable checkpoints; empty where nothing says so."""
    note = _note(config)
    try:
        return "" if note is None else note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


class LocalCheckpoints:
    """Those of one run, on all of its hosts. Its methods are collective, and so is making it.

    Raises:
        BadInput: several hosts have one folder, or there is one host and a partner is asked for.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._settings = config, config.checkpoint.local
        self._folder = together(lambda: local_folder(config), BadInput)
        self._run = ""
        self._kept: str | None = None  # the name of what all hosts are known to have
        self._partners: Partners | None = None
        if self._folder is not None:
            self._meet(self._folder)

    def _meet(self, folder: str) -> None:
        config, top = self._config, host_folder(self._config)
        self._hosts = Hosts.that_share(_seen(top))
        if self._hosts.count > 1:
            _refuse_shared(top, self._hosts)
            self._partners = Partners(folder, os.path.join(str(self._settings.folder), _own_name(config)), self._hosts)
        elif self._settings.partner == "required":
            raise BadInput(f"checkpoint.local.partner is 'required', and all ranks see one '{top}': {ONE_HOST}")

    @property
    def _copies(self) -> bool:
        return self._partners is not None and self._settings.partner != "none"

    @property
    def damaged(self) -> Mapping[str, str]:
        """What `find` has refused of several hosts', and why."""
        return {} if self._partners is None else self._partners.damaged

    def find(self, durable: str | None) -> Mapping[str, Folder]:
        """How each is read that `local_checkpoints` has, of all hosts together, by its path; oldest first.

        Args:
            durable: the first rank's counts.
        """
        if self._folder is None:
            return {}
        if self._partners is None:
            paths = on_first(lambda: local_checkpoints(self._config, durable))
            return {path: _opened(path) for path in paths}
        run, since = on_first(lambda: _wanted(self._config, durable))
        return self._partners.find(run, since) if run else {}

    def due(self, step: int) -> bool:
        """Whether one is to be taken after a step."""
        return self._folder is not None and step % self._settings.every == 0

    def save(self, model: nn.Module, optimizer: Any, extra: dict[str, Any], run: str) -> Copied | None:
        """In the place of the one that is there, once all hosts have their copies of that one, which is returned.

        Raises:
            SaveFailed: this one could not be written, or a copy of that one where a partner is required.
        """
        folder = self._folder
        assert folder is not None
        copied = None if self._partners is None else self._partners.wait()
        if copied is not None and copied.problem and self._settings.partner == "required":
            raise SaveFailed(f"{copied.problem} checkpoint.local.partner=auto goes on without one.")
        path = checkpoint.step_path(folder, extra["step"])
        self._hosts.on_firsts(lambda: self._prepare(folder, run, path), SaveFailed)
        try:
            if self._partners is None:
                checkpoint.save(path, model, optimizer, extra, run=run)
            else:
                save_spread(path, model, optimizer, extra, self._hosts, run=run)
        except SaveFailed as error:
            two = "two of this host's part and two of another's" if self._copies else "two"
            more = f"It is one of checkpoint.local, whose folder needs room for {two}: use another, or null for none."
            raise SaveFailed(f"{error} {more}") from None
        self._kept = os.path.basename(path)
        if self._partners is not None and self._copies:
            self._partners.copy(extra["step"])
        else:
            self._remove_but(self._kept)
        return copied

    def resumed(self, path: str | None) -> None:
        """The run goes on from there, or from a durable one: steps that were taken since are taken again."""
        if (folder := self._folder) is None:
            return
        if self._partners is not None:
            self._partners.done_reading()
        self._take_no_copy()
        self._kept = None if path is None else os.path.basename(path)
        kept = self._kept
        self._hosts.on_firsts(
            lambda: _remove([each for each in _complete(folder) if os.path.basename(each) != kept]), SaveFailed
        )
        if path is not None and self._partners is not None and self._copies:
            self._hosts.on_firsts(lambda: _have_ours(folder), SaveFailed)
            self._partners.complete(path)

    def clear(self) -> None:
        """Remove all, and the folders."""
        self._take_no_copy()
        if (folder := self._folder) is not None:
            self._hosts.on_firsts(lambda: _remove([folder] if _is_ours(folder) else []), SaveFailed)
        self._kept = None

    def begin_anew(self) -> None:
        """There is no run whose checkpoints are here any more."""
        self.clear()
        if (note := _note(self._config)) is not None:
            on_first(lambda: note.unlink(missing_ok=True))

    def close(self) -> None:
        """This rank has no part in them any more. Not collective."""
        if self._partners is not None:
            self._partners.close()

    def _take_no_copy(self) -> None:
        """Nobody takes a copy any more of what is to be removed."""
        if self._partners is not None:
            self._partners.abandon()
            together(lambda: None, SaveFailed)

    def _remove_but(self, kept: str | None) -> None:
        folder = self._folder
        assert folder is not None
        self._hosts.on_firsts(lambda: _remove(_folders(folder, but=kept)), SaveFailed)

    def _prepare(self, folder: str, run: str, path: str) -> None:
        """Have a folder with what is kept alone, a note of whose it is, and nothing at `path`."""
        try:
            _have_ours(folder)
            _remove(_folders(folder, but=self._kept))
            if run != self._run and dist.get_rank() == 0 and (note := _note(self._config)) is not None:
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


def _seen(top: str) -> str:
    """The same for ranks that see the same folder of the same machine."""
    try:
        status = os.stat(top)
    except OSError as error:
        return f"{boot_id()} {error.strerror}"
    return f"{boot_id() or platform.node()} {status.st_dev} {status.st_ino}"


def _refuse_shared(top: str, hosts: Hosts) -> None:
    """Raise `BadInput` where hosts see what others put into their folders, such as one on a network. Collective."""
    own = f".terrazzo-{secrets.token_hex(8)}"

    def look() -> None:
        if hosts.is_first and any(mark and mark != own and os.path.exists(os.path.join(top, mark)) for mark in marks):
            raise BadInput(
                f"checkpoint.local.folder is '{top}', which several hosts see: it is to be each host's own, such as"
                " /dev/shm or a drive of its own. checkpoint.folder is what all share."
            )

    hosts.on_firsts(lambda: Path(top, own).touch(), BadInput)
    try:
        marks = gather_json(own if hosts.is_first else "")
        together(look, BadInput)
    finally:
        if hosts.is_first:
            Path(top, own).unlink(missing_ok=True)


def _opened(path: str) -> Folder:
    store, name = store_and_name(path)
    return store.folder(name)


def _folders(folder: str, but: str | None) -> list[str]:
    """Those in it, what was put aside and what was not finished included."""
    return [entry.path for entry in os.scandir(folder) if entry.name != but and entry.is_dir(follow_symlinks=False)]


def _complete(folder: str) -> list[str]:
    return checkpoint.complete_checkpoints(folder) if _is_ours(folder) else []


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _have_ours(folder: str) -> None:
    """Make it unless it is there. Raises `OSError` unless it is ours then."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_ours(folder):
        raise PermissionError(errno.EPERM, "it is a link, or others can write to it", folder)


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
