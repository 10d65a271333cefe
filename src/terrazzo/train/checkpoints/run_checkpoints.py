"""The checkpoints of a run: who may write to the folder, saving in either way, what is kept, and where to go on."""

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
from terrazzo.files import GIB
from terrazzo.train.checkpoints.local_checkpoints import LocalCheckpoints
from terrazzo.train.checkpoints.resume import saying_what_differs
from terrazzo.train.launch.rank.process_group import Ranks

__all__ = ["RunCheckpoints", "refuse_lost"]


_GRACE_S = 5.0
"""For copies that hosts take of each other, at the end of a run that failed: one of them may be lost next."""


def refuse_lost(lost: str | None) -> None:
    """End the run on all ranks where one of them has `lost` a folder, rather than make another one. Collective."""

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
        run: the identity of the run: drawn when it starts, and the checkpoint's when it is resumed.
        sure_step: the newest step up to which nothing was found wrong with what ranks compute and hold; None where
            nobody looks.
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
        self._claim = together(lambda: checkpoint.claim(self.folder, who) if self.is_first else None, Misuse)

    def find_local(self) -> Mapping[str, CheckpointFolder]:
        """How each local checkpoint is read that is newer than the durable ones, by its path; oldest first. Collective.

        The next `resume` takes these.
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

    def resume(self, model: nn.Module, optimizer: Any, needed: Collection[str]) -> Resumed:
        """Have model and optimizer be those of the newest whole checkpoint, which there was a moment ago. Collective.

        Args:
            needed: what its extra values have at the least.

        Raises:
            BadInput: there is none any more, or it does not fit, or it is not one of a run.
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
        """Save, in the background where that is asked for, and remove what is not to be kept. Collective."""
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
        """A new run begins: no checkpoint that is here is its own. Collective."""
        self._local_folders = None  # what there was then says nothing of what this run will have saved
        self._local.begin_new_run()

    def local_due(self, step: int) -> bool:
        """Whether a local checkpoint is to be taken after a step."""
        return self._local.due(step)

    def save_locally(self, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> CopyResult | None:
        """Save on each host, in the place of the one before; what partners have copied of that one. Collective."""
        refuse_lost(self.lost())
        return self._local.save(model, optimizer, extra, self.run, self._complete_step)

    def suspect(self) -> list[str]:
        """Put aside what was saved since all was known to be right; returns the new names. Collective."""
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
        """What has become of the folder, if it is no longer the one that this run began with; rank 0 looks."""
        if self._claim is None or self._claim.in_place():
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
        """Whether a step that the run has come to, or gone back to, would be gone with the machine."""
        return step > self._begun_step

    def wait(self) -> None:
        """Wait for a save in the background; raises `SaveFailed` on all ranks when it failed on one. Collective."""
        if self._saver is not None:
            self._saver.wait()
        self._complete_step = self._begun_step

    def finish(self) -> None:
        """End a run that went well: what is under way is saved, and others may write to the folder. Collective."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
            self._prune()
        if not self.lacks(self._local.step):
            self._local.clear()
        self._release()

    def abandon(self) -> None:
        """End a run that failed: what is under way is given a moment, and others may write to the folder."""
        if self._saver is not None:
            self._saver.leave()
        self._release(_GRACE_S)

    def _release(self, patience_s: float = 0.0) -> None:
        self._local.close(patience_s)
        if self._claim is not None:
            self._claim.drop()

    def _prune(self) -> None:
        keep = self._settings
        if (last := keep.keep_last) is not None:
            best, sure = keep.keep_best, self.sure_step
            on_first(
                lambda: checkpoint.prune(
                    self.folder, keep_last=last, keep_every=keep.keep_every, keep_best=best, sure=sure, run=self.run
                )
            )
