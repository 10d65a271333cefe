"""Local checkpoints: in memory, or on a drive, of each host, taken more often than durable ones, and gone with it.

They are of the same format, in a folder of the run's own (`local_folder`). Whoever resumes takes one that is newer than
the durable ones, of the same run, and whole. Of several hosts each has its own ranks' part, and a copy of another's, so
that one of them may be lost. There is one checkpoint, and a second one while that is replaced or copied.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn

from terrazzo import checkpoint
from terrazzo.checkpoint.series.partner_hosts import CopyResult, PartnerHosts
from terrazzo.checkpoint.storage.places import store_and_name
from terrazzo.checkpoint.storage.store import CheckpointFolder, step_name, step_of
from terrazzo.config import Config
from terrazzo.errors import BadInput, SaveFailed
from terrazzo.exchange import gather_json, on_first, together
from terrazzo.hosts import Hosts
from terrazzo.train.checkpoints import local_folder
from terrazzo.train.checkpoints.local_folder import ONE_HOST

__all__ = ["LocalCheckpoints"]


class OneHost:
    """The files of local checkpoints where all ranks see one folder: there is nobody to keep a copy."""

    copies = False
    damaged: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find(self, run: str, since: int) -> Mapping[str, CheckpointFolder]:
        """As `PartnerHosts.find`, of what the first rank sees; nothing is read for it."""
        paths = on_first(lambda: local_folder.newer_checkpoints(self._folder, run, since), BadInput)
        places = {path: store_and_name(path) for path in paths}
        return {path: store.folder(name) for path, (store, name) in places.items()}

    def save(self, path: str, model: nn.Module, optimizer: Any, extra: dict[str, Any], run: str) -> None:
        checkpoint.save(path, model, optimizer, extra, run=run)

    def begin_copy(self, step: int) -> bool:
        return False

    def wait_for_copies(self) -> CopyResult | None:
        return None

    def newest_copied(self, path: str) -> str | None:
        return None

    def begin_missing_copies(self, path: str) -> None:
        pass

    def done_reading(self) -> None:
        pass

    def cancel_copies(self) -> None:
        pass

    def close(self, patience_s: float) -> None:
        pass


class LocalCheckpoints:
    """The local checkpoints of one run, on all of its hosts. Its methods are collective, and so is making it.

    Raises:
        BadInput: several hosts have one folder, or there is one host and a partner is asked for.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._settings = config, config.checkpoint.local
        self._folder = together(lambda: local_folder.local_folder(config), BadInput)
        self._noted = ""  # the run whose note is there
        self._newest: str | None = None  # the name of the newest that is whole, on all hosts together
        self._copied: str | None = None  # the name of the newest that one host may be lost of
        self._files: OneHost | PartnerHosts = OneHost("")
        if self._folder is not None:
            top = local_folder.host_folder(config)
            self._hosts = Hosts.that_share(local_folder.seen_as(top))
            self._files = self._files_on(self._folder, top)

    def _files_on(self, folder: str, top: str) -> OneHost | PartnerHosts:
        if self._hosts.count > 1:
            _refuse_shared(top, self._hosts)
            copies = self._settings.partner != "none"
            return PartnerHosts(folder, local_folder.label(self._config), self._hosts, copies=copies)
        if self._settings.partner == "required":
            raise BadInput(f"checkpoint.local.partner is 'required', and all ranks see one '{top}': {ONE_HOST}")
        return OneHost(folder)

    @property
    def step(self) -> int:
        """The step of the newest local checkpoint; 0 where there is none."""
        return step_of(self._newest or "") or 0

    @property
    def damaged(self) -> Mapping[str, str]:
        """What `find` has refused, and why; of one host, opening them says so."""
        return self._files.damaged

    def find(self, durable: str | None) -> Mapping[str, CheckpointFolder]:
        """How each is read that is newer than the `durable` one, of all hosts together, by its path; oldest first.

        Args:
            durable: the first rank's counts.
        """
        if self._folder is None:
            return {}
        run, since = on_first(lambda: local_folder.run_and_step(self._config, durable), BadInput)
        return self._files.find(run, since) if run else {}

    def due(self, step: int) -> bool:
        """Whether one is to be taken after a step."""
        return self._folder is not None and self._config.plan.is_due(step, self._settings.every)

    def save(
        self, model: nn.Module, optimizer: Any, extra: dict[str, Any], run: str, complete_step: int = 0
    ) -> CopyResult | None:
        """Save `extra["step"]`, once the copies of the one before have ended, of which it returns what came of them.

        The newest one with copies stays until this one has some. One without copies makes room for this one, so that
        there are no more than two.

        Args:
            complete_step: of the newest one that is known to be complete in `checkpoint.folder`; the same on all
                ranks. An older one with copies is of no more use.

        Raises:
            SaveFailed: this one could not be written, or a copy of the one before where a partner is required.
        """
        folder = self._folder
        assert folder is not None
        if (copied := self._files.wait_for_copies()) is not None:
            if not copied.problem:
                self._copied = step_name(copied.step)
            elif self._settings.partner == "required":
                raise SaveFailed(f"{copied.problem} checkpoint.local.partner=auto goes on without one.")
        path = checkpoint.step_path(folder, extra["step"])
        is_of_use = self._copied is not None and (step_of(self._copied) or 0) >= complete_step
        stays = self._copied if is_of_use else self._newest
        self._hosts.on_firsts(lambda: self._prepare(folder, run, path, stays), SaveFailed)
        try:
            self._files.save(path, model, optimizer, extra, run)
        except SaveFailed as error:
            two = "two of this host's part and two of another's" if self._files.copies else "two"
            more = f"It is one of checkpoint.local, whose folder needs room for {two}: use another, or null for none."
            raise SaveFailed(f"{error} {more}") from None
        self._newest = newest = os.path.basename(path)
        if not self._files.begin_copy(extra["step"]):
            self._hosts.on_firsts(lambda: local_folder.remove_all_but(folder, {newest}), SaveFailed)
        return copied

    def note_resume(self, path: str | None) -> None:
        """The run goes on from `path`, or from a durable one: steps that were taken since are taken again."""
        if (folder := self._folder) is None:
            return
        self._files.done_reading()
        self._cancel_copies()
        self._newest = None if path is None else os.path.basename(path)
        self._copied = None if path is None else self._files.newest_copied(path)
        stay = {self._newest, self._copied}
        self._hosts.on_firsts(lambda: local_folder.remove_complete_but(folder, stay), SaveFailed)
        if path is not None and self._copied != self._newest:
            self._hosts.on_firsts(lambda: local_folder.make_private(folder), SaveFailed)
            self._files.begin_missing_copies(path)

    def clear(self) -> None:
        """Remove all, and the folders."""
        self._cancel_copies()
        if (folder := self._folder) is not None:
            self._hosts.on_firsts(lambda: local_folder.remove_private(folder), SaveFailed)
        self._newest = self._copied = None

    def begin_new_run(self) -> None:
        """Remove all, and the note of whose they are: a run begins that has none yet."""
        self.clear()
        on_first(lambda: local_folder.forget_run(self._config))

    def close(self, patience_s: float = 0.0) -> None:
        """This rank has no part in them any more. Copies under way are given that long. Not collective."""
        self._files.close(patience_s)

    def _cancel_copies(self) -> None:
        """Nobody takes a copy any more of what is to be removed."""
        if self._folder is not None:
            self._files.cancel_copies()
            together(lambda: None, SaveFailed)

    def _prepare(self, folder: str, run: str, path: str, stays: str | None) -> None:
        """Have a folder with what `stays` alone, a note of whose it is, and nothing at `path`."""
        try:
            local_folder.make_private(folder)
            local_folder.remove_all_but(folder, {stays})
            if run != self._noted and dist.get_rank() == 0:
                local_folder.note_run(self._config, run)
            self._noted = run
            if os.path.lexists(path):
                shutil.rmtree(path)
        except OSError as error:
            raise SaveFailed(
                f"The checkpoint '{path}' was not saved: {error.filename}: {error.strerror}. Use another"
                " checkpoint.local.folder, or null for none."
            ) from None


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
