"""Judges whether a step is like those before it, by its loss and its gradients' norm, on all ranks alike.

Values that are not finite end a run in any case. With a guard (`guard.action`, `guard.spike`) each step is judged
before its update, and may be left out, or make the run go back to a checkpoint.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.device import Stream
from terrazzo.errors import Diverged
from terrazzo.train.session.session import Session
from terrazzo.train.settings.folders import swap_folders

__all__ = ["FEWEST", "StepJudge", "spike_above"]

FEWEST = 8
"""Fewest earlier steps before one can be called a spike."""
NORMAL = 1.4826  # a normal distribution's standard deviation, as a multiple of its median absolute deviation
LEAST = 0.01  # the least deviation, as a share of the median, for numbers that hardly change


def spike_above(before: Sequence[float], deviations: float) -> float:
    """The value above which a number is a spike, after those `before` it; infinite while they are too few.

    It is the median plus `deviations` times the deviation that a normal distribution with this median absolute
    deviation has: a spike in the window moves neither.
    """
    if len(before) < FEWEST:
        return math.inf
    middle = statistics.median(before)
    spread = NORMAL * statistics.median(abs(value - middle) for value in before)
    return middle + deviations * max(spread, LEAST * abs(middle))


class StepJudge:
    """Judges each step of a session once. Loss and norm are the same on every rank, and so are the decisions.

    On a CPU both are known at once, before the optimizer's step. On CUDA the host reads the norm a step later, when the
    next backward has been queued, so that the device never waits for the host; with a guard the host waits at once.
    With fp16, a norm that is not finite while the loss is finite is left to loss scaling, which skips such steps and
    has a limit of its own.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._settings = session, session.config.guard
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._scales = bool(session.optimizer.scaler_state())
        self._checked = math.nan, math.nan  # loss and norm that `check` has returned last
        self.forget()

    def forget(self) -> None:
        """Forget the steps since the last `check`, which will be done again."""
        self._losses: list[Tensor] = []  # of steps that `check` has not seen, this rank's share of each
        self._norms: list[Tensor] = []  # of the same steps, over all ranks
        self._steps: list[int] = []  # their numbers
        self._newest: int | None = None
        self._queued: tuple[Tensor, torch.Event | None] | None = None

    @property
    def has_unseen(self) -> bool:
        """Whether there were steps since the last `check`."""
        return bool(self._losses)

    @property
    def newest(self) -> int | None:
        """The newest step that was taken, and not left out; None before the first, and after `forget`."""
        return self._newest

    def objection(self, loss: Tensor, norm: Tensor) -> str | None:
        """What is wrong with a step, given its gradients, so that `act` must be called; None if nothing is.

        Args:
            loss: this rank's share of the loss.
            norm: of the gradients over all ranks, before clipping.

        Raises:
            Diverged: on all ranks, without a guard, if this step's norm is not finite; on CUDA, if that of the step
                before is not.
        """
        if self._settings.acts and (why := self._unlike(loss, norm)) is not None:
            return why
        self._losses.append(loss)
        self._norms.append(norm)
        self._newest = self._session.step + 1
        self._steps.append(self._newest)
        if not self._settings.acts and not self._scales and not math.isfinite(known := self._norm_on_host(norm)):
            self._refuse_norm(known)
        return None

    def _refuse_norm(self, norm: float) -> None:
        """Raise `Diverged`; if replicas train by themselves, only on the ranks of this one, as the others go on."""
        if self._session.config.plan.sync_every is not None:
            self.refuse(f"gradients' norm of a replica, near step {self._newest},", norm)
        self.check()

    def _unlike(self, loss: Tensor, norm: Tensor) -> str | None:
        judged = self._session.progress.judged
        both = (
            ("loss", float(self._session.share.total(loss.detach().clone())), judged.losses),
            ("gradients' norm", float(norm), judged.norms),
        )
        for what, value, before in both:
            if not math.isfinite(value):
                return None if self._scales and before is judged.norms else f"its {what} is {value}"
            if self._settings.spike is not None and value > (most := spike_above(before, self._settings.spike)):
                return f"its {what} is {value:.4g}, where more than {most:.4g} is a spike"
        for _, value, before in both:
            before.append(value)
            del before[: -self._settings.window]
        return None

    def _norm_on_host(self, norm: Tensor) -> float:
        """The newest norm that the host can read without stalling the device."""
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

    def check(self) -> tuple[float, float]:
        """The mean loss and the norm of `newest`, after checking all steps since the last call. Collective.

        Raises:
            Diverged: at the first that is not finite, in its loss or its norm: a NaN gradient leaves NaN weights behind
                a finite loss.
        """
        if not self._steps:  # on all ranks alike
            return self._checked
        values: list[float] = self._session.share.total(torch.stack(self._losses)).tolist()
        norms: list[float] = torch.stack(self._norms).tolist()
        steps = self._steps
        self._losses, self._norms, self._steps = [], [], []
        for step, value, norm in zip(steps, values, norms, strict=True):
            self.refuse(f"loss of step {step}", value)
            if not self._scales:
                self.refuse(f"gradients' norm of step {step}", norm)
        self._checked = values[-1], norms[-1]
        return self._checked

    def refuse(self, what: str, value: float) -> None:
        """Raise `Diverged` if `value`, the same on all ranks, is not finite; `what` names it."""
        if not math.isfinite(value):
            raise Diverged(
                f"The {what} is {value}. Lower optimizer.lr, lengthen schedule.warmup_steps, set train.clip, or use"
                f" precision bf16 or fp32; {self._saved()}.{self._doubt_of_drives()}"
            )

    def _saved(self) -> str:
        step = self._session.checkpoints.saved_step
        return f"checkpoints up to step {step} are intact" if step else "there is no checkpoint yet"

    def _doubt_of_drives(self) -> str:
        config = self._session.config
        if config.offload.digest or not swap_folders(config):
            return ""
        return " If nothing explains it: offload.digest=true checks what the drives of offload.path give back."

    def act(self, why: str) -> str:
        """Act on an objection as `guard.action` says; returns what was done, in words. Collective.

        Raises:
            Diverged: the run is to end.
        """
        session, settings, progress = self._session, self._settings, self._session.progress
        session.optimizer.zero_grad()
        step = session.step + 1
        if settings.action == "stop":
            raise Diverged(
                f"Step {step} was not taken: {why}. Lower optimizer.lr, set train.clip, or let guard.action=skip or"
                f" rollback go on; {self._saved()}."
            )
        if len(progress.skipped) >= settings.limit:
            raise Diverged(
                f"Step {step} was not taken: {why}. That is one more than guard.limit {settings.limit} allows; before"
                f" it: {_skipped_text(progress.skipped)}. Gone on with, the run comes to the same steps again: lower"
                " optimizer.lr, or raise guard.limit."
            )
        if settings.action == "skip":
            with warnings.catch_warnings():  # before the first update torch takes this for a mistake
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
                session.schedule.step()
            progress.step = step
            progress.skipped.append({"step": step, "batches": 1, "why": why})
            return f"step {step} not taken: {why}"
        return self._roll_back(step, why)

    def _roll_back(self, step: int, why: str) -> str:
        session = self._session
        session.checkpoints.wait()
        if not session.checkpoints.saved_step:
            raise Diverged(
                f"Step {step} was not taken: {why}, and there is no checkpoint to go back to. Set checkpoint.every, or"
                " guard.action=skip."
            )
        skipped = session.progress.skipped
        reached = session.loader.cursor  # beyond the step, where batches were left out before
        session.restore()
        batches = session.loader.skip_to(reached) + session.loader.skip(self._settings.skip_batches)
        session.progress.skipped = [*skipped, {"step": step, "batches": batches, "why": why}]
        around = f"{batches} {'batch' if batches == 1 else 'batches'}"
        return f"step {step} not taken, back to {session.step}, around {around}: {why}"


def _skipped_text(skipped: Sequence[Mapping[str, Any]]) -> str:
    """`step 3, 2 times; step 7`; `none` if there are none."""
    times = Counter(each["step"] for each in skipped)
    texts = [f"step {step}" if count == 1 else f"step {step}, {count} times" for step, count in times.items()]
    return "; ".join(texts) or "none"
