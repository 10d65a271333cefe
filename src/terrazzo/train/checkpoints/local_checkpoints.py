"""Local checkpoints: in the memory or on a drive of each host, taken more often than durable ones, lost with the host.

They have the same format, in a folder of the run's own (`local_folder`). A run resumes from one that is newer than its
durable ones, of the same run, and complete. Each of several hosts has the part of its own ranks and a copy of another
host's, so that one host may be lost. There is one checkpoint, and a second one while it is replaced or copied.
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
from terrazzo.train.settings.intervals import is_due

__all__ = ["LocalCheckpoints"]


class OneHost:
    """The files of local checkpoints if all ranks are on one host, so that no other host can keep a copy."""

    copies = False
    damaged: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find(self, run: str, since: int) -> Mapping[str, CheckpointFolder]:
        """`PartnerHosts.find`, by what the first rank sees, without reading files."""
        paths = on_first(lambda: local_folder.newer_checkpoints(self._folder, run, since), BadInput)
        stores = {path: store_and_name(path) for path in paths}
        return {path: store.folder(name) for path, (store, name) in stores.items()}

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
    """The local checkpoints of one run, on all of its hosts. Making one, and its methods, are collective.

    Raises:
        BadInput: several hosts share one folder, or a partner is required and there is one host.
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
        """The step of the newest local checkpoint; 0 if there is none."""
        return step_of(self._newest or "") or 0

    @property
    def damaged(self) -> Mapping[str, str]:
        """What `find` has refused, and why; empty on one host, where opening a checkpoint says so."""
        return self._files.damaged

    def find(self, durable: str | None) -> Mapping[str, CheckpointFolder]:
        """Folders to read local checkpoints from that are newer than the `durable` one, by path, oldest first.

        Args:
            durable: path of the newest durable checkpoint; the first rank's counts.
        """
        if self._folder is None:
            return {}
        run, since = on_first(lambda: local_folder.run_and_step(self._config, durable), BadInput)
        return self._files.find(run, since) if run else {}

    def due(self, step: int) -> bool:
        """Whether a local checkpoint is due after a step."""
        return self._folder is not None and is_due(self._config.plan, step, self._settings.every)

    def save(
        self, model: nn.Module, optimizer: Any, extra: dict[str, Any], run: str, complete_step: int = 0
    ) -> CopyResult | None:
        """Save step `extra["step"]`, once copying the one before has ended; returns how that went.

        The newest checkpoint with copies is kept until this one has copies; one without copies is removed first, so
        that there are never more than two.

        Args:
            complete_step: the newest step that is known to be complete in `checkpoint.folder`, the same on all ranks.
                An older local checkpoint is not kept for its copies.

        Raises:
            SaveFailed: this checkpoint could not be written, or the one before not copied to a required partner.
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
        """The run continues from the local checkpoint `path`, or from a durable one (None): remove newer ones."""
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
        """Remove all local checkpoints and their folders."""
        self._cancel_copies()
        if (folder := self._folder) is not None:
            self._hosts.on_firsts(lambda: local_folder.remove_private(folder), SaveFailed)
        self._newest = self._copied = None

    def begin_new_run(self) -> None:
        """Remove all local checkpoints, and the note of their run: a new run begins."""
        self.clear()
        on_first(lambda: local_folder.forget_run(self._config))

    def close(self, patience_s: float = 0.0) -> None:
        """Stop, giving copies that are under way `patience_s`. Not collective."""
        self._files.close(patience_s)

    def _cancel_copies(self) -> None:
        """Stop copying what is about to be removed."""
        if self._folder is not None:
            self._files.cancel_copies()
            together(lambda: None, SaveFailed)

    def _prepare(self, folder: str, run: str, path: str, stays: str | None) -> None:
        """Make the folder, remove all but `stays`, note the run, and clear `path`."""
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
    """Raise `BadInput` if hosts see each other's files, as in a folder on the network. Collective."""
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
