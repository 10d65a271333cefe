"""The training loop: `TrainingLoop` takes the steps of a session, and does what is due between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from terrazzo.engine import engine_of
from terrazzo.engine.instrumentation.phases import Phases
from terrazzo.exit_codes import PREEMPTED
from terrazzo.launch.stopping.stop_request import StopRequest
from terrazzo.telemetry import StepRecorder
from terrazzo.train.checkpoints.export import export
from terrazzo.train.checkpoints.run_checkpoints import refuse_lost
from terrazzo.train.model.experts import balance_experts, forget_load
from terrazzo.train.report import LogWindow, RunReport
from terrazzo.train.session.session import Session
from terrazzo.train.settings.run_command import RunCommand
from terrazzo.train.steps.cadence import Cadence
from terrazzo.train.steps.due import DueWork, due_work
from terrazzo.train.steps.evaluate import evaluate, sample_text
from terrazzo.train.steps.judge import StepJudge
from terrazzo.train.steps.replica_checks import ReplicaChecks
from terrazzo.train.steps.step import backward_on, update

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """Runs a session to its last step, or until it is asked to stop; `on_step_end` is called after each step."""

    def __init__(
        self,
        session: Session,
        stop: StopRequest,
        command: RunCommand | None = None,
        on_step_end: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.session, self.stop, self.on_step_end = session, stop, on_step_end
        self.engine = engine_of(session.model)
        self.window = LogWindow(session)
        self.report = RunReport(session, command or RunCommand(), self.window)
        self.judge, self.cadence = StepJudge(session), Cadence(session)
        self.checks = ReplicaChecks(session)
        self.recorder = StepRecorder(self.engine, session.micro_batches)

    def run(self) -> int:
        """Train; returns the exit code: 0 when all steps are done, `PREEMPTED` after a requested stop."""
        try:
            return self._run()
        except BaseException as error:
            self.report.failed(error)
            raise

    def _run(self) -> int:
        session, train = self.session, self.session.config.train
        first_step = session.step
        self.report.begin()
        if train.eval_every is not None and session.step == 0:
            self.validate()
        self.window.begin()
        self.recorder.begin()
        stopped = False
        while session.step < train.steps and not stopped:
            before = session.step
            self.train_step()
            joined = self.engine.rounds is None or self.engine.rounds.begins
            stopped = joined and self.agree_to_stop()
            self.window.step_ended()
            self.recorder.step_done()
            self.on_step_end(session.step)
            if not joined:
                continue  # groups of ranks are training by themselves: there is no common state to report
            if session.step > before:
                self.after_step(stopped=stopped)
            else:  # it went back to a checkpoint, where all that was due has been done
                self.went_back()
        is_cut_short = stopped and session.step < train.steps
        self.finish(trained=session.step > first_step, stopped=is_cut_short)
        return PREEMPTED if is_cut_short else 0

    def agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop; raises on all ranks if one has lost a folder or a save. Collective."""
        checkpoints = self.session.checkpoints
        lost = checkpoints.lost() or self.report.lost()
        self.engine.traffic.record("control", self.stop.NBYTES)
        with self.waiting_for_all():
            stopped, broken = self.stop.agreed(checkpoints.failed() or lost is not None)
        if broken:
            refuse_lost(lost)
            checkpoints.wait()
        return stopped

    def waiting_for_all(self) -> AbstractContextManager[None]:
        """A context for an exchange between all ranks, in which a rank alone waits for nobody."""
        if self.session.ranks.world_size == 1:
            return nullcontext()
        return self.engine.traffic.times_of("", "control").waiting(late=True)

    def after_step(self, *, stopped: bool) -> None:
        """Do what is due after a step that was taken: a log step, an evaluation, a checkpoint."""
        session = self.session
        due = due_work(
            session,
            self.cadence,
            newest=self.judge.newest,
            row_step=self.window.first_step,
            is_first_row=self.window.is_first,
            stopped=stopped,
        )
        if due.row:
            self.log()
        if stopped and session.step < session.config.train.steps:
            self.report.stopping()
        with self.window.apart():
            self.between_steps(due)
        self.recorder.take()
        if due.row:
            self.record()

    def finish(self, *, trained: bool, stopped: bool) -> None:
        """End a run that went well: save, export and report what is left.

        Args:
            trained: whether a step was taken since this start.
            stopped: whether there are steps left.
        """
        session = self.session
        with self.phases.during("save"):
            if session.checkpoints.lacks(session.step):  # after going back, this step may be saved on this machine only
                self.report.checkpoint(session.save())
            session.checkpoints.wait()
            if session.step == session.config.train.steps and session.config.checkpoint.save_format == "hf":
                path = export(session.config, session.checkpoints, session.model, session.step, trained=trained)
                self.report.export(path)
            session.checkpoints.finish()  # releases the folder: from now on others may change it
            self.report.end(stopped=stopped)

    @property
    def phases(self) -> Phases:
        return self.engine.tally.phases

    def train_step(self) -> None:
        """One optimizer step."""
        session = self.session
        self.checks.begin_step()
        with self.window.reading(), self.phases.during("input"):
            batch = session.loader.next_step()
        total, norm = backward_on(session, batch)
        loss = total / max(1, batch.samples)
        if (why := self.judge.objection(loss, norm)) is not None:
            self.skip_step(why)
            return
        self.checks.before_update()
        update(session)
        self.window.step_taken(session.optimizer.param_groups[0]["lr"], balance_experts(session.model))
        session.schedule.step()
        session.progress.step += 1
        session.progress.tokens += batch.valid_tokens
        self.report.step_done(self.engine.traffic)

    def skip_step(self, why: str) -> None:
        """Leave out the step that is under way, as the guard wants it."""
        session, before = self.session, self.session.step
        forget_load(session.model)
        with self.phases.during("save"):  # it may read a checkpoint
            done = self.judge.act(why)
        if session.step <= before:  # the step before may have been saved
            self.report.back()
        self.report.skip(done, session.progress.skipped[-1])

    def went_back(self) -> None:
        """Forget measurements and checks of steps that will be done again."""
        self.checks.went_back()
        self.judge.forget()
        self.window.begin()
        self.recorder.begin()
        self.cadence.begin()

    def log(self) -> None:
        """Check all losses since the last log step, and report the newest with what was measured since then."""
        loss, grad_norm = self.judge.check()
        assert self.judge.newest is not None
        self.report.log_step(self.window.row(self.judge.newest, loss, grad_norm))
        self.window.begin()

    def record(self) -> None:
        """Write where each rank's time went since the last record, between steps too. Collective.

        It does not wait for the device.
        """
        numbers = torch.tensor(self.recorder.numbers(), dtype=torch.float64)
        of_ranks = torch.zeros(dist.get_world_size(), len(numbers), dtype=torch.float64)
        of_ranks[dist.get_rank()] = numbers  # zero on all others, so that sums are exact
        self.engine.traffic.record("control", 8 * of_ranks.numel())
        with self.waiting_for_all():
            dist.all_reduce(of_ranks)
        self.report.step_record(self.recorder.record() | {"skew": self.recorder.skew(of_ranks.tolist())})
        self.recorder.take()  # this exchange belongs to the next record; the next step counts from zero

    def validate(self) -> None:
        """Measure and report the validation loss, if there are data for it; raises `Diverged` if it is not finite."""
        validation = evaluate(self.session)
        if validation is not None:
            self.judge.refuse(f"validation loss of step {self.session.step}", validation.loss)
            self.session.progress.validations.add(self.session.step, validation.loss)
        self.report.validation(validation)

    def between_steps(self, due: DueWork) -> None:
        """Do the checks, evaluation, save and sample that are due after the current step."""
        session = self.session
        with self.cadence.apart():
            self.checks.after_step()
        if due.evaluation:
            with self.phases.during("evaluate"), self.cadence.apart():
                self.validate()
        if due.save:
            if self.judge.has_unseen:
                self.judge.check()
            with self.phases.during("save"), self.cadence.saving():
                saved = session.save()
            self.report.checkpoint(saved)
            if (choice := self.cadence.choose()) is not None:
                self.report.cadence(choice)
        elif due.local_save:
            if self.judge.has_unseen:
                self.judge.check()
            with self.phases.during("local_save"), self.cadence.apart():
                copied = session.save_locally()
            if copied is not None:
                self.report.partner_copy(copied)
        if due.sample:  # last: if it fails, nothing is lost
            with self.phases.during("evaluate"), self.cadence.apart():
                text = sample_text(session)
            self.report.sample(text)
