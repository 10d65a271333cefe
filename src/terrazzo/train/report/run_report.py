"""Everything that a run reports, from its header to the command that continues it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from terrazzo.checkpoint.series.partner_hosts import CopyResult
from terrazzo.config import Config, without_passwords
from terrazzo.engine import Traffic, engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, lost_a_rank
from terrazzo.messages import counted
from terrazzo.shell_command import terrazzo_command
from terrazzo.telemetry import StepMetrics, TimeLeft, Verdict, duration, restart_text
from terrazzo.telemetry.log.records import validation_text
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.step_record import StepRecord
from terrazzo.train.data.tokenizer import BYTES
from terrazzo.train.model.head_loss import why_all_logits
from terrazzo.train.model.objectives import Validation
from terrazzo.train.report.log_files import LogFiles
from terrazzo.train.report.log_window import LogWindow
from terrazzo.train.report.mesh_picture import mesh_picture
from terrazzo.train.report.run_review import RunReview, differing_settings
from terrazzo.train.report.run_screen import RunScreen
from terrazzo.train.report.summary import Pace, SentBytes, bytes_line, summarize
from terrazzo.train.session.session import Session
from terrazzo.train.settings.plan import mesh_shape
from terrazzo.train.settings.run_command import RunCommand
from terrazzo.train.steps.cadence import SaveInterval

__all__ = ["RunReport"]


class RunReport:
    """Reports events on the screen and in files. Every rank has one; only rank 0's has a screen and files."""

    def __init__(self, session: Session, command: RunCommand, window: LogWindow) -> None:
        self._session, self._command, self._window = session, command, window
        self._screen = RunScreen(session.ranks.is_first, session.config.train.steps, window.known)
        plan = engine_of(session.model).plan.name
        self._files = LogFiles(session, f"{_model(session)}: {plan}, {_precision(session.config)}")
        self._start, self._first_step = time.perf_counter(), session.step
        self._sent = SentBytes()
        self._first_validation = self._files.first_validation()
        self._last_validation: Validation | None = None
        self._last_sample = ""
        self._lacks_copy = False
        self._left = TimeLeft()

    def lost(self) -> str | None:
        """A description of the log folder, if its files were moved or removed; else None. Only rank 0 looks."""
        return self._files.lost()

    def begin(self) -> None:
        """Print the header."""
        session, train = self._session, self._session.config.train
        for label, text in _header(session):
            self._screen.row(label, text)
        if session.origin.restart is not None:
            entry = {**asdict(session.origin.restart), **self._begun()}
            self._screen.note(restart_text(entry))
            self._files.log("restart", entry)
        elif session.step:
            self._files.log("begin", self._begun())
        for note in session.notes:
            self._screen.note(note)
        self._screen.begin(train.steps, session.step)

    def _begun(self) -> dict[str, Any]:
        """The values of the line that marks a start which continues the run."""
        session = self._session
        return {"ranks": session.ranks.world_size, "same_evaluation": session.origin.same_evaluation}

    def log_step(self, metrics: StepMetrics) -> None:
        """A row of the log."""
        self._files.log("train", metrics.as_dict(), metrics.step)
        if load := self._window.load:
            self._files.log("experts", {name: list(each.counts) for name, each in load.items()}, metrics.step)
        self._screen.log_step(metrics, self._left.after(metrics.step, self._session.config.train.steps, metrics.step_s))

    def step_record(self, record: StepRecord) -> None:
        """A step record; it goes into files only, and says how long the rest will take."""
        self._left.take(record)
        self._files.log("step", record)

    def validation(self, validation: Validation | None) -> None:
        """A validation loss."""
        if validation is None:
            return
        self._first_validation = self._first_validation or (self._session.step, validation)
        self._last_validation = validation
        self._files.log("validation", validation.as_dict())
        self._remark(validation_text(validation.as_dict()), f"{validation.loss:.4f}")

    def sample(self, text: str) -> None:
        """A text sample; the last one is shown at the end."""
        self._files.log("sample", {"text": text})
        self._last_sample = text
        if self._session.step < self._session.config.train.steps:
            self._remark(self._screen.on_one_line(f"sample: {text}"))

    def checkpoint(self, path: str) -> None:
        """A checkpoint was written, or will be in the background."""
        self._remark(f"{'saving' if self._session.config.checkpoint.background else 'saved'} {path}")

    def cadence(self, choice: SaveInterval) -> None:
        """How often checkpoints are saved from now on."""
        self._files.log("cadence", asdict(choice))
        self._remark(str(choice))

    def partner_copy(self, result: CopyResult) -> None:
        """How copying a local checkpoint to partner hosts went; a failure is printed when it first happens."""
        self._files.log("partner", result.as_dict())
        if result.problem and not self._lacks_copy:
            back = "to the newest local checkpoint with copies, or to checkpoint.folder"
            self._remark(f"{result.problem} Until there is one, a lost host takes the run back {back}.")
        self._lacks_copy = bool(result.problem)

    def skip(self, done: str, entry: dict[str, Any]) -> None:
        """The guard has left a step out."""
        self._files.log("guard", {"not_taken": entry["step"], "batches": entry["batches"], "why": entry["why"]})
        self._screen.advance(self._session.step)
        self._remark(done)

    def back(self) -> None:
        """The run has gone back to an earlier step: drop what was written about later ones."""
        self._files.back()
        if 0 < self._session.step < self._first_step:  # the line of this start was of a later step
            self._files.log("begin", self._begun())
        self._first_validation = self._files.first_validation() or self._first_validation

    def stopping(self) -> None:
        """The run was asked to stop, and will save."""
        self._remark("stopping as asked: saving")

    def export(self, path: Path) -> None:
        """A Hugging Face folder was written."""
        self._remark(f"exported {path}")

    def step_done(self, traffic: Traffic) -> None:
        """An optimizer step was made with this traffic."""
        outer = engine_of(self._session.model).rounds
        self._sent.add(traffic.by_name(), ends_round=outer is None or outer.begins)
        self._screen.advance(self._session.step)

    def end(self, *, stopped: bool) -> None:
        """Print and write the summary, and close all files."""
        if not self._screen.speaks:
            return
        self._screen.close()
        if not self._files:
            self._say_nothing_left()
            return
        session, pace = self._session, self._window.pace
        verdict = self._verdict()
        if verdict is not None:
            self._files.log("verdict", verdict.as_dict())
        summary = summarize(session, self._sent, pace, self._window.peak_bytes, self._window.peak_flops)
        self._files.log("summary", summary)
        per_second = f", {pace.tokens / pace.seconds:,.0f} tok/s" if pace.seconds else ""
        at = f"step {session.step} of {session.config.train.steps}, {self._time_text(pace)}"
        if self._restarts:
            at += f", after {counted(self._restarts, 'restart')}"
        self._screen.say("")
        self._screen.row("stopped" if stopped else "done", at + per_second + self._loss_change())
        self._screen.row("bytes", bytes_line(summary))
        if verdict is not None:
            self._screen.row("verdict", str(verdict))
        if self._last_sample and not stopped:
            self._screen.row("sample", self._screen.on_one_line(self._last_sample))
        self.leave()
        if (page := self._files.written_page) is not None:
            self._screen.row("report", str(page))
        if session.config.log.note and not stopped:
            self._screen.say(session.config.log.note.rstrip("\n").replace("{terrazzo}", terrazzo_command()))
        self._say_how_to_go_on(finished=not stopped)

    def _time_text(self, pace: Pace) -> str:
        """How long it took since this start: in steps, which the rate is of, and in all where that differs."""
        in_all, of_steps = duration(time.perf_counter() - self._start), duration(pace.seconds_in_all)
        return in_all if of_steps == in_all or not pace.steps else f"{of_steps} of steps, {in_all} in all"

    def _verdict(self) -> Verdict | None:
        """What bounds the run's step; None if it was a single one, in which all is done for the first time, or if a
        full disk has left no line of it, which the log has said on stderr.
        """
        try:
            review = RunReview(self._session.config.log.folder)
        except BadInput:
            return None
        verdict = review.verdict()
        return verdict if verdict is not None and verdict.steps > 1 else None

    def _loss_change(self) -> str:
        if self._first_validation is None or self._last_validation is None:
            return ""
        (step, first), last = self._first_validation, self._last_validation
        if last is first or step == self._session.step or first.unit != last.unit:  # nothing to compare with
            return ""
        since = f" since step {step}" if step else ""
        return f"; {first.number(2)} → {last.number(2)} {first.unit}{since}"

    def failed(self, error: BaseException) -> None:
        """The run ends with an error, which is printed elsewhere: say what is saved, and close all files.

        Where another rank was lost, and all are about to be started again, the launcher says so, and from where.
        """
        self.leave()
        if lost_a_rank(error) and self._restarts < self._session.config.launch.restarts:
            return
        session, saved = self._session, self._session.checkpoints.saved_step
        if session.step and session.step < session.config.train.steps:
            self._screen.say("")
            self._screen.row(
                "failed", f"after step {session.step} of {session.config.train.steps}; {_saved_text(saved)}"
            )
            if saved:
                self._say_how_to_go_on(finished=False)

    @property
    def _restarts(self) -> int:
        """How often this run's launcher has started its ranks again."""
        restart = self._session.origin.restart
        return restart.number if restart is not None else 0

    def leave(self) -> None:
        """Remove the progress bar and close all files."""
        self._screen.close()
        self._files.close()

    def _say_how_to_go_on(self, *, finished: bool) -> None:
        self._screen.command("continue", self._command.going_on(self._session.config, finished=finished))

    def _say_nothing_left(self) -> None:
        """Say that a finished run was started again, so that nothing was done."""
        session = self._session
        at = f"step {session.step} of {session.config.train.steps} is in {session.checkpoints.folder}"
        self._screen.say("")
        self._screen.row("done", f"nothing left to do: {at}")
        written = RunFolder(session.config.log.folder).settings()
        asked = without_passwords(session.config.model_dump(mode="json"))
        if written is not None and (others := differing_settings(written, asked)):
            texts = ", ".join(f"{key}={now} (the run had {before})" for key, before, now in others)
            self._screen.row("settings", f"no step was taken with {texts}")
        self._screen.row("anew", "another log.folder, or checkpoint.resume=never checkpoint.overwrite=true")
        self._say_how_to_go_on(finished=True)

    def _remark(self, text: str, loss: str = "") -> None:
        self._screen.remark(self._session.step, text, loss)


def _header(session: Session) -> list[tuple[str, str]]:
    """Labels and texts."""
    config, data, size = session.config, session.data, session.ranks.world_size
    count, engine = session.micro_batches, engine_of(session.model)
    rows = [("model", _model(session)), ("data", f"{data.train.tokens_numel:,} training tokens")]
    rows += [("loss", _loss_unit(session))]
    if (why := why_all_logits(session.model)) is not None:
        rows.append(("loss", f"of all logits, as {why}"))
    rows += [("data", str(data.skipped))] if data.skipped.names else []
    rows += [("data", note) for note in data.notes]
    ranks = counted(size, f"{session.ranks.device.type.upper()} rank")
    each = "" if devices.is_cuda(session.ranks.device) else f", {_threads()}{' each' if size > 1 else ''}"
    rows.append(("plan", f"{engine.plan.name} on {ranks}, {_precision(config)}{each}"))
    rows += zip(("mesh", ""), mesh_picture(mesh_shape(config.plan.mesh, size)), strict=False)
    if (plan := config.plan).sync_every is not None:
        outer = f"lr {plan.outer.lr:g}, momentum {plan.outer.momentum:g}, in {plan.outer.traffic}"
        groups = plan.mesh.groups(size)
        apart = "group (plan.mesh.dp_replicate) trains by itself"
        apart = apart if groups == 1 else "groups (plan.mesh.dp_replicate) train by themselves"
        rows.append(("rounds", f"{groups} {apart}, an outer step every {plan.sync_every} steps: {outer}"))
        if (meet_every := plan.outer.meet_every) is not None:
            turns = counted(plan.outer.fragments, "fragment")
            rows.append(
                ("", f"{turns} by turns, {plan.outer.delay} steps behind; groups meet every {meet_every} steps")
            )
    micro = f" in {count} micro-batches per rank" if count > 1 else ""
    rows.append(("step", f"{config.batch.global_batch} × {config.batch.sequence_length} tokens{micro}"))
    rows.append(("memory", f"{_bill_text(session)} per rank, beside activations"))
    return [*rows, ("folder", str(config.log.folder))]


def _model(session: Session) -> str:
    members = [member for bucket in engine_of(session.model).buckets() for member in bucket.members]
    numel = sum(math.prod(member.shape) for member in members)
    trainable = sum(math.prod(member.shape) for member in members if member.trainable)
    of_them = "" if trainable == numel else f" ({trainable / 1e6:.2f} M trained)"
    return f"{type(session.model).__name__}, {numel / 1e6:.2f} M parameters{of_them}"


def _loss_unit(session: Session) -> str:
    """What the loss of this run is a mean over, and what bits per byte are of."""
    data, tokenizer = session.data.train, session.config.data.tokenizer
    if session.config.objective.kind.of_pairs:
        return "nats per preference pair"
    learnt = "" if data.cache.spans is None else "learnt "
    if tokenizer == BYTES:
        return f"nats per {learnt}byte"
    size = f"{data.bytes_per_token:.2f} bytes of text in the mean"
    return f"nats per {learnt}token of {tokenizer}, {size}; bits per byte are of the same text"


def _bill_text(session: Session) -> str:
    bill = engine_of(session.model).promise.memory(session.micro_batches)
    parts = {"": bill.total_bytes, " of the host": bill.host_bytes, " in files": bill.disk_bytes}
    return ", ".join(f"{count / 2**20:,.1f} MiB{where}" for where, count in parts.items() if count or not where)


def _precision(config: Config) -> str:
    """The precision of a run in words: its name, and the dtypes that differ from it."""
    others = {"name", "linears", "skip", "rounding", "gather", "quantized_reduce", "error_feedback"}
    dtypes = config.precision.model_dump(exclude=others, exclude_none=True)
    rounding = {"stochastic": ["stochastic rounding"], "remainder": ["remainder kept"]}.get(
        config.precision.rounding, []
    )
    gather = [f"gathered in {config.precision.gather}"] if config.precision.gather != "compute" else []
    if config.precision.quantized_reduce != "none":
        feedback = " with error feedback" if config.precision.error_feedback else ""
        gather.append(f"gradients sent in {config.precision.quantized_reduce}{feedback}")
    linears = [f"linears {config.precision.linears}"] if config.precision.recipe else []
    return ", ".join(
        [config.precision.name, *(f"{state} {dtype}" for state, dtype in dtypes.items()), *rounding, *gather, *linears]
    )


def _threads() -> str:
    return counted(torch.get_num_threads(), "thread")


def _saved_text(step: int) -> str:
    return f"step {step} is saved" if step else "nothing is saved"
