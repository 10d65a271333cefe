"""Losses and norms of gradients that are not finite: seen in the step that has them, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream
from terrazzo.errors import Diverged
from terrazzo.train.session.session import Session
from terrazzo.train.settings.folders import swap_folders

__all__ = ["DivergenceWatch"]


class DivergenceWatch:
    """Ends a run that has diverged. The norm over all ranks decides, in each step: it is the same number on each.

    On a CPU it is known at once, before the optimizer's step. On CUDA the host reads it a step later, when the next
    step's backward has been queued: it waits for what the device has long begun, and the device never for the host.
    fp16 skips the steps whose gradients overflow, and has a limit of its own; there losses alone decide, when they are
    brought together.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._skips = bool(session.optimizer.scaler_state())
        self._losses: list[Tensor] = []  # of steps that `check` has not seen, this rank's share of each
        self._norms: list[Tensor] = []  # of the same steps, over all ranks
        self._steps: list[int] = []  # their numbers
        self._queued: tuple[Tensor, torch.Event | None] | None = None

    @property
    def has_unseen(self) -> bool:
        """Whether there were steps since the last `check`."""
        return bool(self._losses)

    @property
    def newest(self) -> int | None:
        """The newest step since the last `check`; none that the guard has left out."""
        return self._steps[-1] if self._steps else None

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Take in a step whose gradients are there.

        Args:
            loss: this rank's share of it.
            norm: of the gradients over all ranks, before clipping.

        Raises:
            Diverged: on all ranks, if this step's norm is not finite; on CUDA, if that of the step before is not.
        """
        self._losses.append(loss)
        self._norms.append(norm)
        self._steps.append(self._session.step + 1)
        if not self._skips and not math.isfinite(self._known(norm)):
            self.check()

    def _known(self, norm: Tensor) -> float:
        """The newest norm that the host can have without keeping the device waiting."""
        if not self._on_cuda:
            return float(norm)
        copy = norm.to("cpu", non_blocking=True)  # torch pins it
        before, self._queued = self._queued, (copy, Stream.current(norm.device).mark())
        if before is None:
            return 0.0
        known, mark = before
        if mark is not None:
            mark.synchronize()
        return float(known)

    def check(self, numbers: Sequence[float] = ()) -> tuple[float, float, list[list[float]]]:
        """The newest step's mean loss per token and norm. All steps since the last call are looked at. Collective.

        Args:
            numbers: for the other ranks, as many on each; those of all come back in rank order.

        Raises:
            Diverged: at the first that is not finite, in its loss or its norm: a NaN gradient leaves NaN weights behind
                a finite loss.
        """
        values, everyone = self._session.share.total_beside(torch.stack(self._losses), numbers)
        norms: list[float] = torch.stack(self._norms).tolist()
        steps = self._steps
        self._losses, self._norms, self._steps = [], [], []
        for step, value, norm in zip(steps, values, norms, strict=True):
            self.refuse(f"loss of step {step}", value)
            if not self._skips:
                self.refuse(f"gradients' norm of step {step}", norm)
        return values[-1], norms[-1], everyone

    def refuse(self, what: str, value: float) -> None:
        """Raise `Diverged` where `value`, the same on all ranks, is not finite; `what` names it."""
        if not math.isfinite(value):
            raise Diverged(
                f"The {what} is {value}. Lower optimizer.lr, lengthen schedule.warmup_steps, set train.clip, or use"
                f" precision bf16 or fp32; checkpoints up to step {self._session.keeper.saved_step} are intact."
                f"{self._doubt_of_drives()}"
            )

    def _doubt_of_drives(self) -> str:
        config = self._session.config
        if config.offload.digest or not swap_folders(config):
            return ""
        return " If nothing explains it: offload.digest=true checks what the drives of offload.path give back."
