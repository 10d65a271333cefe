"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.checkpoint import check_replicas
from terrazzo.engine import engine_of
from terrazzo.errors import Diverged
from terrazzo.telemetry import PeakMemory, Stopwatch
from terrazzo.train.checkpoints.export import export
from terrazzo.train.checkpoints.keeping import refuse_lost
from terrazzo.train.command import Command
from terrazzo.train.data import GlobalBatch
from terrazzo.train.evaluate import evaluate, sample_text
from terrazzo.train.folders import swap_folders
from terrazzo.train.launch.stop import StopRequest
from terrazzo.train.launch.telling import PREEMPTED
from terrazzo.train.model.experts import Load, auxiliary_loss, balance_experts
from terrazzo.train.objectives import objective_of
from terrazzo.train.report import Measured, Report
from terrazzo.train.session import Session

__all__ = ["Trainer", "step_on"]


class Trainer:
    """Runs a session to its last step, or until it is asked to stop."""

    def __init__(self, session: Session, stop: StopRequest, command: Command | None = None) -> None:
        self.session, self.stop = session, stop
        self.engine = engine_of(session.model)
        self.report = Report(session, command or Command())
        self.watch = Stopwatch()
        self.memory = PeakMemory(session.ranks.device)
        self.losses: list[Tensor] = []  # of the steps since they were last checked, this rank's share of each
        self.norms: list[Tensor] = []  # of the same steps, the gradients' global norm before clipping
        self.wait_s, self.learning_rate = 0.0, 0.0
        self.load: dict[str, Load] = {}  # of the experts in the newest step, by router
        self.step_at_log, self.tokens_at_log = session.step, session.tokens

    def run(self) -> int:
        """Train; the exit code: 0 when all steps are done, `PREEMPTED` after a requested stop."""
        try:
            return self._run()
        except BaseException:
            self.report.failed()
            raise

    def _run(self) -> int:
        session, train = self.session, self.session.config.train
        first_step = session.step
        self.report.begin()
        if train.eval_every is not None and session.step == 0:
            self.validate()
        self.watch.reset()
        stopped = False
        while session.step < train.steps and not stopped:
            self.train_step()
            lost = session.keeper.lost() or self.report.lost()
            stopped, broken = self.stop.agreed(session.keeper.failed() or lost is not None)
            if broken:
                refuse_lost(lost)
                session.keeper.wait()
            last = stopped or session.step == train.steps
            if last or session.step % session.config.log.every == 0:
                self.log()
            if stopped and session.step < train.steps:
                self.report.stopping()
            with self.watch.pause():
                self.between_steps(finished=session.step == train.steps, last=last)
        session.keeper.finish()
        if session.step == train.steps and session.config.checkpoint.save_format == "hf":
            self.report.exported(export(session, trained=session.step > first_step))
        self.report.end(stopped=stopped and session.step < train.steps)
        return PREEMPTED if stopped and session.step < train.steps else 0

    def train_step(self) -> None:
        """One optimizer step."""
        session = self.session
        with self.watch.measure():
            batch = session.loader.next_step()
        total, norm = step_on(session, batch)
        self.load = balance_experts(session.model)
        self.learning_rate = session.optimizer.param_groups[0]["lr"]  # what the step was taken with
        session.schedule.step()
        session.step += 1
        session.tokens += batch.valid_tokens
        self.losses.append(total / max(1, batch.samples))
        self.norms.append(norm)
        self.wait_s += self.engine.traffic.total_wait_s
        self.report.step_done(self.engine.traffic)

    def log(self) -> None:
        """Check the losses and report the newest, with what was measured since the last log step."""
        loss, grad_norm = self.checked()
        session = self.session
        measured = Measured(
            loss=loss,
            learning_rate=self.learning_rate,
            grad_norm=grad_norm,
            steps=session.step - self.step_at_log,  # a save in between has emptied the losses
            tokens=session.tokens - self.tokens_at_log,
            total_s=self.watch.total_s,
            data_wait_s=self.watch.measured_s,
            communication_s=self.wait_s,
            peak_memory_bytes=self.memory.peak_bytes,
            load=self.load,
        )
        self.report.log_step(measured)
        self.step_at_log, self.tokens_at_log, self.wait_s = session.step, session.tokens, 0.0
        self.watch.reset()

    def checked(self) -> tuple[float, float]:
        """The newest step's mean loss per token and gradients' norm; raises `Diverged` at the first that is not finite.

        All steps since the last call are looked at, and both of each: a NaN gradient leaves NaN weights behind a finite
        loss. They are brought together once per log step and before a save, so that no other step waits for the device.
        """
        values: list[float] = self.session.parts.total(torch.stack(self.losses)).tolist()
        norms: list[float] = torch.stack(self.norms).tolist()
        self.losses, self.norms = [], []
        fp16 = bool(self.session.optimizer.scaler_state())  # it skips the steps whose gradient overflowed
        for index, (value, norm) in enumerate(zip(values, norms, strict=True)):
            step = self.session.step - len(values) + 1 + index
            self._check_finite(f"loss of step {step}", value)
            if not fp16:
                self._check_finite(f"gradients' norm of step {step}", norm)
        return values[-1], norms[-1]

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise Diverged(
                f"The {what} is {value}. Lower optimizer.lr, lengthen schedule.warmup_steps, set train.clip, or use"
                f" precision bf16 or fp32; checkpoints up to step {self.session.keeper.saved_step} are intact."
                f"{self._doubt_of_drives()}"
            )

    def _doubt_of_drives(self) -> str:
        config = self.session.config
        if config.offload.digest or not swap_folders(config):
            return ""
        return " If nothing explains it: offload.digest=true checks what the drives of offload.path give back."

    def validate(self) -> None:
        """Measure and report the validation loss, where there are data for it."""
        found = evaluate(self.session)
        if found is not None:
            self.session.validated(found.loss)
        self.report.validation(found)

    def between_steps(self, *, finished: bool, last: bool) -> None:
        """Comparisons, evaluation, checkpoints and samples that are due after the current step."""
        session, train = self.session, self.session.config.train
        if _due(session.step, train.check_replicas_every):
            check_replicas(session.model)
        if finished or _due(session.step, train.eval_every):
            self.validate()
        if last or _due(session.step, session.config.checkpoint.every):
            if self.losses:
                self.checked()
            self.report.saved(session.save())
        if session.prompt and (finished or _due(session.step, train.sample_every)):  # nothing is lost to it
            self.report.sample(sample_text(session))


def step_on(session: Session, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """Forward and backward of every micro-batch, clipping, and the optimizer's step.

    Returns this rank's sum of the losses of all samples, and the gradients' global norm before clipping.
    """
    engine_of(session.model).traffic.reset()
    session.model.set_gradient_denominator(max(1, batch.samples))  # type: ignore[operator]
    total, objective = torch.zeros((), device=session.ranks.device), objective_of(session.config)
    for index, micro_batch in enumerate(batch.micro_batches):
        is_last = index == len(batch.micro_batches) - 1
        with nullcontext() if is_last else tz.accumulate(session.model):
            loss = objective.loss(session.model, micro_batch, session.ranks.device)
            total += loss.detach()
            if (auxiliary := auxiliary_loss(session.model)) is not None:  # learnt, and no part of what is reported
                loss = loss + auxiliary
            loss.backward()
    norm = tz.clip_grad_norm_(session.model, session.config.train.clip or math.inf)
    session.optimizer.step()
    session.optimizer.zero_grad()
    return total, norm


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
