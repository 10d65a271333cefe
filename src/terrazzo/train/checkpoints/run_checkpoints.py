"""The checkpoints of a run: claiming the folder, saving, pruning, and resuming."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from torch import nn

from terrazzo import checkpoint
from terrazzo.checkpoint import Resumed, Saver, step_of
from terrazzo.checkpoint.loading.terrazzo_checkpoint import TerrazzoCheckpoint
from terrazzo.checkpoint.series.partner_hosts import CopyResult
from terrazzo.checkpoint.storage.store import CheckpointFolder
from terrazzo.config import Config
from terrazzo.errors import BadInput, FolderLost, Misuse
from terrazzo.exchange import broadcast_json, on_first, together
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.messages import GIB
from terrazzo.train.checkpoints.local_checkpoints import LocalCheckpoints
from terrazzo.train.checkpoints.resume import saying_what_differs

__all__ = ["RunCheckpoints", "refuse_lost"]


_GRACE_S = 5.0
"""Seconds for copies between hosts at the end of a run that failed: one of the hosts may be lost next."""


def refuse_lost(lost: str | None) -> None:
    """Raise `FolderLost` on all ranks if one has `lost` a folder, rather than make it again. Collective."""

    def look() -> None:
        if lost is not None:
            raise FolderLost(
                f"While training, {lost} was renamed, removed or replaced: nothing more is written there. Put it back"
                " under its name and start the same command again, which continues from its newest checkpoint."
            )

    together(look, FolderLost)


class RunCheckpoints:
    """Saves and restores a run in `checkpoint.folder`, which no other run may write to meanwhile.

    Attributes:
        run: the identity of the run: random for a new run, the checkpoint's for a resumed one.
        sure_step: the newest step up to which the checks of ranks have found nothing wrong; None without checks.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config, self._local = config, LocalCheckpoints(config)
        self._settings, self.folder, self.is_first = config.checkpoint, config.checkpoint_folder, ranks.is_first
        self._patience_s = config.launch.timeout_s
        self.run: str = broadcast_json(os.urandom(6).hex())
        self._saver: Saver | None = None
        # Steps of saves in `checkpoint.folder`, 0 for none: the newest, which may still be under way, and the newest
        # that is known to be complete. One in the background is when it was waited for, as the next one does. Both are
        # 0 after a resume from a local checkpoint: an older one there is not looked for.
        self._begun_step = self._complete_step = 0
        self.sure_step: int | None = None
        self._local_folders: Mapping[str, CheckpointFolder] | None = None
        who = f"process {os.getpid()} on {platform.node()}, since {datetime.now(UTC).isoformat(timespec='seconds')}"
        self._lock = together(lambda: checkpoint.claim(self.folder, who) if self.is_first else None, Misuse)

    def find_local(self) -> Mapping[str, CheckpointFolder]:
        """Folders to read local checkpoints from that are newer than the durable ones, by path; oldest first.

        Collective. The next `restore` takes these.
        """
        self._local_folders = self._local.find(on_first(lambda: checkpoint.latest(self.folder), BadInput))
        return self._local_folders

    def extra_of(self, path: str) -> dict[str, Any]:
        """The extra values of a durable checkpoint, or of one of those that `find_local` has found.

        Raises:
            TerrazzoError: it cannot be read.
        """
        local = (self._local_folders or {}).get(path)
        return checkpoint.open_source(path).extra if local is None else TerrazzoCheckpoint(local).extra

    def restore(self, model: nn.Module, optimizer: Any, needed: Collection[str]) -> Resumed:
        """Restore model and optimizer from the newest complete checkpoint. Collective.

        Args:
            needed: keys that its extra values must have.

        Raises:
            BadInput: there is no checkpoint any more, or it does not fit, or is not one of `terrazzo train`.
        """
        local, self._local_folders = self.find_local() if self._local_folders is None else self._local_folders, None
        with saying_what_differs(self._config, self.folder):
            resumed = checkpoint.load_newest(self.folder, model, optimizer, cast=self._settings.cast, besides=local)
        if resumed is None:  # nothing else has given the model its weights
            raise BadInput(
                f"{self.folder} had a checkpoint when this run began, and has none that can be read now: put it back,"
                " or start anew with checkpoint.resume=never."
            )
        if missing := sorted(set(needed) - resumed.extra.keys()):
            raise BadInput(
                f"The newest checkpoint in {self.folder} is not of 'terrazzo train': its extra has no"
                f" {', '.join(missing)}. Go on with it by tz.checkpoint.load in a loop of your own, or use another"
                " checkpoint.folder."
            )
        is_local = resumed.path in local
        self._local.note_resume(resumed.path if is_local else None)
        self.run = resumed.run
        self._begun_step = self._complete_step = 0 if is_local else resumed.extra["step"]
        self.sure_step = resumed.extra.get("sure")
        return replace(resumed, refused={**self._local.damaged, **resumed.refused})

    def save(self, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> str:
        """Save a checkpoint, in the background if configured, and prune old ones; returns its path. Collective."""
        refuse_lost(self.lost())
        step, path = extra["step"], checkpoint.step_path(self.folder, extra["step"])
        if self._settings.background:
            if self._saver is None:
                limit = None if self._settings.staging_gib is None else int(self._settings.staging_gib * GIB)
                self._saver = Saver(
                    model, optimizer, run=self.run, staging_limit_bytes=limit, patience_s=self._patience_s
                )
            self._saver.save(path, extra)  # waits for the one before
            self._complete_step = self._begun_step
        else:
            checkpoint.save(path, model, optimizer, extra, run=self.run)
            self._complete_step = step
        self._begun_step = step
        self._prune()
        return path

    def begin_new_run(self) -> None:
        """A new run begins: forget local checkpoints of earlier ones. Collective."""
        self._local_folders = None  # what there was then says nothing of what this run will have saved
        self._local.begin_new_run()

    def local_due(self, step: int) -> bool:
        """Whether a local checkpoint is due after a step."""
        return self._local.due(step)

    def save_locally(self, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> CopyResult | None:
        """Save on each host, replacing the one before; returns how copying that to partners went. Collective."""
        refuse_lost(self.lost())
        return self._local.save(model, optimizer, extra, self.run, self._complete_step)

    def suspect(self) -> list[str]:
        """Put aside as suspect what was saved after `sure_step`; returns the new names. Collective."""
        self.wait()
        self._local.clear()
        names, newest = on_first(self._put_aside)
        if names:
            self._begun_step = self._complete_step = newest
        return names

    def _put_aside(self) -> tuple[list[str], int]:
        """The new names, and the step of the newest checkpoint that is left; 0 for none."""
        names = checkpoint.suspect(self.folder, after=self.sure_step or 0, run=self.run)
        return names, step_of(checkpoint.latest(self.folder) or "") or 0

    def lost(self) -> str | None:
        """A description of the folder, if it was moved or replaced since the start; else None. Only rank 0 looks."""
        if self._lock is None or self._lock.in_place():
            return None
        return f"the checkpoint folder '{self.folder}' (checkpoint.folder)"

    def failed(self) -> bool:
        """Whether a save in the background is known to have failed on this rank."""
        return self._saver is not None and self._saver.failed()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is known to be complete, local ones included; 0 for none."""
        return max(self._complete_step, self._local.step)

    def lacks(self, step: int) -> bool:
        """Whether `step` is not in `checkpoint.folder`, so that it would be lost with the machine."""
        return step > self._begun_step

    def wait(self) -> None:
        """Wait for a save in the background; raises `SaveFailed` on all ranks when it failed on one. Collective."""
        if self._saver is not None:
            self._saver.wait()
        self._complete_step = self._begun_step

    def finish(self) -> None:
        """End a run that went well: finish saves that are under way, and release the folder. Collective."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            self._prune()
        if not self.lacks(self._local.step):
            self._local.clear()
        self._release()

    def abandon(self) -> None:
        """End a run that failed: give what is under way a moment, and release the folder."""
        if self._saver is not None:
            self._saver.leave()
        self._release(_GRACE_S)

    def _release(self, patience_s: float = 0.0) -> None:
        self._local.close(patience_s)
        if self._lock is not None:
            self._lock.drop()

    def _prune(self) -> None:
        keep = self._settings
        if (last := keep.keep_last) is not None:
            best, sure = keep.keep_best, self.sure_step
            on_first(
                lambda: checkpoint.prune(
                    self.folder, keep_last=last, keep_every=keep.keep_every, keep_best=best, sure=sure, run=self.run
                )
            )
