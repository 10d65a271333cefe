"""The training loop: steps, and what happens between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from terrazzo.engine import engine_of
from terrazzo.engine.comm.phases import Phases
from terrazzo.exit_codes import PREEMPTED
from terrazzo.telemetry import PeakMemory, StepRecorder, Stopwatch
from terrazzo.train.checkpoints.export import export
from terrazzo.train.checkpoints.keeping import refuse_lost
from terrazzo.train.launch.stop_signals import StopRequest
from terrazzo.train.model.expert_load import Load
from terrazzo.train.model.experts import balance_experts, forget_load
from terrazzo.train.replay.due import Checks
from terrazzo.train.report import RunReport, StepsMeasured
from terrazzo.train.session.reference import is_known
from terrazzo.train.session.session import Session
from terrazzo.train.settings.command import Command
from terrazzo.train.steps.cadence import Cadence
from terrazzo.train.steps.evaluate import evaluate, sample_text
from terrazzo.train.steps.judge import StepJudge
from terrazzo.train.steps.step import backward_on, update

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Runs a session to its last step, or until it is asked to stop; `ended` is called behind each step."""

    def __init__(
        self,
        session: Session,
        stop: StopRequest,
        command: Command | None = None,
        ended: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.session, self.stop, self.ended = session, stop, ended
        self.engine = engine_of(session.model)
        self.report = RunReport(session, command or Command())
        self.watch = Stopwatch()
        self.memory = PeakMemory(session.ranks.device)
        self.judge, self.cadence = StepJudge(session), Cadence(session)
        self.checks = Checks(session)
        self.recorder = StepRecorder(self.engine, session.micro_batches)
        self.wait_s, self.learning_rate = 0.0, 0.0
        self.load: dict[str, Load] = {}  # of the experts in the newest step, by router
        self.step_at_log, self.tokens_at_log = session.step, session.progress.tokens

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
        self.recorder.begin()
        stopped = False
        while session.step < train.steps and not stopped:
            before = session.step
            self.train_step()
            lost = session.keeper.lost() or self.report.lost()
            self.engine.traffic.record("control", self.stop.NBYTES)
            with self.engine.traffic.times_of("", "control").waiting(late=True):
                stopped, broken = self.stop.agreed(session.keeper.failed() or lost is not None)
            if broken:
                refuse_lost(lost)
                session.keeper.wait()
            self.count_waits()
            if session.step <= before:  # back at a checkpoint, which has all that is due there
                self.begin_anew()
                continue
            last = stopped or session.step == train.steps
            logs = self.log_due(last=last)
            if logs:
                self.log()
            if stopped and session.step < train.steps:
                self.report.stopping()
            with self.watch.pause():
                self.between_steps(finished=session.step == train.steps, last=last)
            self.recorder.take()
            if logs:
                self.record()
        with self.phases.during("save"):
            if session.keeper.lacks(session.step):  # it was gone back to, and is on this machine alone
                self.report.saved(session.save())
            session.keeper.finish()
            if session.step == train.steps and session.config.checkpoint.save_format == "hf":
                trained = session.step > first_step
                path = export(session.config, session.keeper, session.model, session.step, trained=trained)
                self.report.exported(path)
            self.report.end(stopped=stopped and session.step < train.steps)
        return PREEMPTED if stopped and session.step < train.steps else 0

    @property
    def phases(self) -> Phases:
        return self.engine.tally.phases

    def train_step(self) -> None:
        """One optimizer step."""
        session = self.session
        self.checks.begin_step()
        with self.watch.measure(), self.phases.during("input"):
            batch = session.loader.next_step()
            assert all(map(is_known, batch.micro_batches))
        total, norm = backward_on(session, batch)
        loss = total / max(1, batch.samples)
        if (why := self.judge.objection(loss, norm)) is not None:
            self.left_out(why)
            return
        self.checks.before_update()
        update(session)
        self.load = balance_experts(session.model)
        self.learning_rate = session.optimizer.param_groups[0]["lr"]  # what the step was taken with
        session.schedule.step()
        session.progress.step += 1
        session.progress.tokens += batch.valid_tokens
        self.report.step_done(self.engine.traffic)

    def left_out(self, why: str) -> None:
        """The step that is under way is not taken."""
        session, before = self.session, self.session.step
        forget_load(session.model)
        with self.phases.during("save"):  # it may read a checkpoint
            done = self.judge.act(why)
        if session.step <= before:  # the step before may have been saved
            self.report.back()
        self.report.left_out(done, session.progress.skipped[-1])

    def begin_anew(self) -> None:
        """Forget what was measured of steps that are done again."""
        session = self.session
        self.judge.forget()
        self.step_at_log, self.tokens_at_log, self.wait_s = session.step, session.progress.tokens, 0.0
        self.watch.reset()
        self.recorder.begin()
        self.cadence.begin()

    def count_waits(self) -> None:
        """A step has ended, the ranks' agreement on what comes next included."""
        traffic = self.engine.traffic
        self.wait_s += traffic.total_wait_s + traffic.control_wait_s
        self.recorder.step_done()
        self.ended(self.session.step)

    def log_due(self, *, last: bool) -> bool:
        """Whether a row is due: behind every log step, and behind the next one that is taken where one was left out.

        Behind the last step it is of the newest that was taken.
        """
        every, step, newest = self.session.config.log.every, self.session.step, self.judge.newest
        if newest is None or newest <= self.step_at_log:
            return False
        return last or (newest == step and step // every > self.step_at_log // every)

    def log(self) -> None:
        """Check the losses and report the newest, with what was measured since the last log step."""
        loss, grad_norm = self.judge.check()
        session, newest = self.session, self.judge.newest
        assert newest is not None
        measured = StepsMeasured(
            step=newest,
            loss=loss,
            learning_rate=self.learning_rate,
            grad_norm=grad_norm,
            steps=session.step - self.step_at_log,  # a save in between has emptied the losses
            tokens=session.progress.tokens - self.tokens_at_log,
            total_s=self.watch.total_s,
            data_wait_s=self.watch.measured_s,
            communication_s=self.wait_s,
            peak_memory_bytes=self.memory.peak_bytes,
            load=self.load,
        )
        self.report.log_step(measured)
        self.step_at_log, self.tokens_at_log, self.wait_s = session.step, session.progress.tokens, 0.0
        self.watch.reset()

    def record(self) -> None:
        """Write where the time of the steps since the last record went, what is between them included, on each rank.
        Collective; it waits for no device.
        """
        numbers = torch.tensor(self.recorder.numbers(), dtype=torch.float64)
        told = torch.zeros(dist.get_world_size(), len(numbers), dtype=torch.float64)
        told[dist.get_rank()] = numbers  # zero on all others, so that sums are exact
        self.engine.traffic.record("control", 8 * told.numel())
        with self.engine.traffic.times_of("", "control").waiting(late=True):
            dist.all_reduce(told)
        self.report.step_record(self.recorder.record() | {"skew": self.recorder.skew(told.tolist())})
        self.recorder.take()  # of the next record: the next step counts its exchanges from zero

    def validate(self) -> None:
        """Measure and report the validation loss, where there are data for it. Raises `Diverged`: it is not finite."""
        found = evaluate(self.session)
        if found is not None:
            self.judge.refuse(f"validation loss of step {self.session.step}", found.loss)
            self.session.progress.validations.add(self.session.step, found.loss)
        self.report.validation(found)

    def between_steps(self, *, finished: bool, last: bool) -> None:
        """Comparisons, evaluation, checkpoints and samples that are due after the current step."""
        session, train = self.session, self.session.config.train
        with self.cadence.apart():
            self.checks.after_step()
        if finished or _due(session.step, train.eval_every):
            with self.phases.during("evaluate"), self.cadence.apart():
                self.validate()
        if last or self.cadence.due(session.step):
            if self.judge.has_unseen:
                self.judge.check()
            with self.phases.during("save"), self.cadence.saving():
                saved = session.save()
            self.report.saved(saved)
            if (choice := self.cadence.choose()) is not None:
                self.report.cadence(choice)
        elif session.keeper.local_due(session.step):
            if self.judge.has_unseen:
                self.judge.check()
            with self.phases.during("save"), self.cadence.apart():
                copied = session.save_locally()
            if copied is not None:
                self.report.copied(copied)
        if session.sampling.prompt and (finished or _due(session.step, train.sample_every)):  # nothing is lost to it
            with self.phases.during("evaluate"), self.cadence.apart():
                text = sample_text(session)
            self.report.sample(text)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
