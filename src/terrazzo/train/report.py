"""What a run says: its header, a row for each log step, and at the end what to open and how to go on.

On screen is what decides whether to let it run; all else is in the run's folder: `plan.txt`, `metrics.jsonl` and
`report.html`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from terrazzo.config import Config, without_passwords
from terrazzo.engine import Traffic, engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import counted, printable
from terrazzo.planner.machine.devices import this_machine
from terrazzo.telemetry import (
    Console,
    JsonLines,
    ReportPage,
    Sink,
    StepMetrics,
    StepTable,
    TensorBoard,
    duration,
    restart_text,
)
from terrazzo.train.cadence import Choice
from terrazzo.train.command import Command, folded, program
from terrazzo.train.look import verdict_on
from terrazzo.train.mesh_picture import mesh_picture
from terrazzo.train.model.load import Load, counters_of
from terrazzo.train.model.objectives import Validation
from terrazzo.train.plan import build_precision, mesh_shape
from terrazzo.train.promise.as_setup import matmul_format
from terrazzo.train.promise.summary import Pace, bytes_line, summarize, summary_lines, utilised
from terrazzo.train.session import Session

__all__ = ["Measured", "Report"]

LABEL = 10


@dataclass(frozen=True)
class Measured:
    """What the loop measured since the previous log step, on this rank; losses and load are of the newest step."""

    loss: float
    learning_rate: float
    grad_norm: float
    steps: int
    tokens: int
    total_s: float
    data_wait_s: float
    communication_s: float
    peak_memory_bytes: int
    load: Mapping[str, Load]


def peak_flops(config: Config) -> float | None:
    """Per second, of this machine's device in the format that the run computes in; None where it is not known."""
    return this_machine().device.peak_flops.get(matmul_format(build_precision(config)))


class Report:
    """Everything that is said and written. Every rank has one; only rank 0's has a screen and files."""

    def __init__(self, session: Session, command: Command) -> None:
        self._session, self._command = session, command
        self._engine = engine_of(session.model)
        self._console = Console() if session.ranks.is_first else None
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._peak_flops = peak_flops(session.config) if self._on_cuda else None
        width = self._console.width if self._console is not None else 0
        self._table = StepTable(session.config.train.steps, self._known(), width)
        self._sinks: list[Sink] = []
        self._metrics_file: JsonLines | None = None
        self._start = time.perf_counter()
        self._traffic: dict[str, int] = {}  # bytes of the newest step, as `Traffic.by_name`
        self._pace, self._peak_bytes = Pace(), 0
        self._usage = self._engine.store.usage()  # of memory and files beside the device, at the last log step
        self._first_validation: tuple[int, Validation] | None = None  # of the run, where its metrics are here
        self._last_validation: Validation | None = None
        self._last_sample = ""
        if session.ranks.is_first and session.step < session.config.train.steps:
            self._open()  # else nothing is left to be done, and what was written of it stays as it is

    def _open(self) -> None:
        session, log = self._session, self._session.config.log
        config = without_passwords(session.config.model_dump(mode="json"))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (log.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        bill = self._engine.promise.memory(session.micro_batches)
        plan = without_passwords(f"{self._engine.describe()}\n\nmemory of each rank:\n{bill.table()}")
        (log.folder / "plan.txt").write_text(plan + "\n", encoding="utf-8")
        self._metrics_file = JsonLines(log.folder / "metrics.jsonl", session.step)
        if session.origin.same_evaluation and (line := self._metrics_file.first("validation")) is not None:
            self._first_validation = line["step"], Validation.from_dict(line)
        title = f"{self._model()}: {self._engine.plan.name}, {_precision(session.config)}"
        details = {"Plan": plan, "Configuration": text}
        page = ReportPage(log.folder / "report.html", self._metrics_file.path, title, details, summary_lines)
        self._sinks += [self._metrics_file, page]
        if log.tensorboard:
            self._sinks.append(TensorBoard(log.folder / "tensorboard", session.step))

    def _known(self) -> set[str]:
        """The optional metrics that this run has: what a device does not tell, or a plan does not do, has no column."""
        tiers = {tier for unit in self._engine.units for tier in unit.buckets[0].tiers}
        session = self._session
        has = {
            "mfu": self._peak_flops is not None,
            "tflops": self._on_cuda and self._peak_flops is None,
            "communication": not self._on_cuda and self._session.ranks.world_size > 1,
            "expert_imbalance": session.config.model.experts.count is not None or any(counters_of(session.model)),
            "skipped_steps": bool(self._session.optimizer.scaler_state()),
            "disk_read_gb_s": "nvme" in tiers,
            "disk_write_gb_s": "nvme" in tiers,
            "cpu_step_gparam_s": bool(tiers - {"device"}),
        }
        return {name for name, is_there in has.items() if is_there}

    def lost(self) -> str | None:
        """What has become of the log folder, if its files are no longer where they were begun; rank 0 looks."""
        if self._metrics_file is None or self._metrics_file.in_place():
            return None
        return f"the log folder '{self._session.config.log.folder}' (log.folder), or metrics.jsonl in it,"

    def begin(self) -> None:
        """The header: what is about to run."""
        session, config = self._session, self._session.config
        batch, count, size = config.batch, session.micro_batches, session.ranks.world_size
        micro = f" in {count} micro-batches per rank" if count > 1 else ""
        self._row("model", self._model())
        self._row("data", f"{session.data.train.tokens_numel:,} training tokens")
        if session.data.skipped.names:
            self._row("data", str(session.data.skipped))
        for note in session.data.notes:
            self._row("data", note)
        ranks = counted(size, f"{session.ranks.device.type.upper()} rank")
        threads = "" if self._on_cuda else f", {_threads()}{' each' if size > 1 else ''}"
        self._row("plan", f"{self._engine.plan.name} on {ranks}, {_precision(config)}{threads}")
        for label, line in zip(("mesh", ""), mesh_picture(mesh_shape(config.plan.mesh, size)), strict=False):
            self._row(label, line)
        self._row("step", f"{batch.global_batch} × {batch.sequence_length} tokens{micro}")
        self._row("memory", f"{self._bill_text()} per rank, beside activations")
        self._row("folder", str(config.log.folder))
        if session.restart is not None:
            told = {**asdict(session.restart), "ranks": size}
            self._note(restart_text(told))
            self._log("restart", told)
        for note in session.notes:
            self._note(note)
        if session.step < config.train.steps:
            self._say(f"\n{self._table.header()}")
        if self._console is not None:
            self._console.begin(config.train.steps, session.step)

    def log_step(self, measured: Measured) -> None:
        """A log step."""
        self._pace.add(measured.steps, measured.tokens, measured.total_s)
        self._peak_bytes = measured.peak_memory_bytes
        metrics = self._metrics(measured)
        self._log("train", metrics.as_dict())
        if measured.load:
            self._log("experts", {name: list(load.counts) for name, load in measured.load.items()})
        left = self._session.config.train.steps - metrics.step
        self._say(self._table.row(metrics, left * metrics.step_s))

    def step_record(self, record: dict[str, Any]) -> None:
        """Where the time of the steps since the last one went; in files alone."""
        self._log("step", record)

    def validation(self, found: Validation | None) -> None:
        """A validation loss."""
        if found is None:
            return
        self._first_validation = self._first_validation or (self._session.step, found)
        self._last_validation = found
        self._log("validation", found.as_dict())
        self._remark(f"held out, {found.number(4)} {found.unit}", f"{found.loss:.4f}")

    def sample(self, text: str) -> None:
        """A text sample; the last one is in the summary."""
        self._log("sample", {"text": text})
        self._last_sample = text
        if self._session.step < self._session.config.train.steps:
            self._remark(self._shortened(f"sample: {_on_one_line(text)}", beside=LABEL))

    def saved(self, path: str) -> None:
        """A checkpoint was written, or will be in the background."""
        self._remark(f"{'saving' if self._session.config.checkpoint.background else 'saved'} {path}")

    def cadence(self, choice: Choice) -> None:
        """How often checkpoints are saved from now on."""
        self._log("cadence", asdict(choice))
        self._remark(str(choice))

    def left_out(self, done: str, entry: dict[str, Any]) -> None:
        """The guard has left a step out."""
        self._log("guard", {"not_taken": entry["step"], "batches": entry["batches"], "why": entry["why"]})
        self._remark(done)

    def back(self) -> None:
        """The run goes on from an earlier step: what was written of later ones is of steps that are done again."""
        if self._sinks:
            for sink in self._sinks:
                sink.close()
            self._sinks = []
            self._open()

    def stopping(self) -> None:
        """Somebody has asked for it: what is left is to save."""
        self._remark("stopping as asked: saving")

    def exported(self, path: Path) -> None:
        """A Hugging Face folder was written."""
        self._remark(f"exported {path}")

    def step_done(self, traffic: Traffic) -> None:
        """An optimizer step was made with this traffic."""
        self._traffic = traffic.by_name()
        if self._console is not None:
            self._console.advance()

    def end(self, *, stopped: bool) -> None:
        """The summary, and the end of all files."""
        if self._console is None:
            return
        self._console.close()
        if not self._sinks:
            self._say_nothing_left()
            return
        session, pace = self._session, self._pace
        verdict = verdict_on(session.config.log.folder)
        if verdict is not None:
            self._log("verdict", verdict.as_dict())
        summary = summarize(session, self._traffic, pace, self._peak_bytes, self._peak_flops)
        self._log("summary", summary)
        per_second = f", {pace.tokens / pace.seconds:,.0f} tok/s" if pace.seconds else ""
        at = f"step {session.step} of {session.config.train.steps}, {duration(time.perf_counter() - self._start)}"
        self._say("")
        self._row("stopped" if stopped else "done", at + per_second + self._learnt())
        self._row("bytes", bytes_line(summary))
        if verdict is not None:
            self._row("verdict", str(verdict))
        if self._last_sample and not stopped:
            self._row("sample", self._shortened(_on_one_line(self._last_sample), beside=LABEL))
        self._row("report", str(session.config.log.folder / "report.html"))
        if session.config.log.note and not stopped:
            self._say(session.config.log.note.rstrip("\n").replace("{terrazzo}", program()))
        self.leave()
        self._say_how_to_go_on(finished=not stopped)

    def _learnt(self) -> str:
        if self._first_validation is None or self._last_validation is None:
            return ""
        (step, first), last = self._first_validation, self._last_validation
        if last is first or step == self._session.step or first.unit != last.unit:  # nothing to compare with
            return ""
        since = f" since step {step}" if step else ""
        return f"; {first.number(2)} → {last.number(2)} {first.unit}{since}"

    def failed(self) -> None:
        """The run ends with an error, which others say: what there is to go on from, and the end of all files."""
        self.leave()
        session, saved = self._session, self._session.keeper.saved_step
        if session.step and session.step < session.config.train.steps:
            self._say("")
            self._row("failed", f"after step {session.step} of {session.config.train.steps}; {_saved(saved)}")
            if saved:
                self._say_how_to_go_on(finished=False)

    def leave(self) -> None:
        """The end of the progress bar and of all files."""
        if self._console is not None:
            self._console.close()
        for sink in self._sinks:
            sink.close()

    def _say_how_to_go_on(self, *, finished: bool) -> None:
        command = self._command.going_on(self._session.config, finished=finished)
        width = self._console.width if self._console is not None else 0
        self._say(folded(f"{'continue':<{LABEL}}", command, width), needed=True)

    def _say_nothing_left(self) -> None:
        """Of a finished run that was started again: there is nothing that was measured."""
        session = self._session
        at = f"step {session.step} of {session.config.train.steps} is in {session.keeper.folder}"
        self._say("")
        self._row("done", f"nothing left to do: {at}")
        self._row("anew", "another log.folder, or checkpoint.resume=never checkpoint.overwrite=true")
        self._say_how_to_go_on(finished=True)

    def _model(self) -> str:
        members = [member for bucket in self._engine.buckets() for member in bucket.members]
        numel = sum(math.prod(member.shape) for member in members)
        learnt = sum(math.prod(member.shape) for member in members if member.trainable)
        of_them = "" if learnt == numel else f" ({learnt / 1e6:.2f} M trained)"
        return f"{type(self._session.model).__name__}, {numel / 1e6:.2f} M parameters{of_them}"

    def _bill_text(self) -> str:
        bill = self._engine.promise.memory(self._session.micro_batches)
        parts = {"": bill.total_bytes, " of the host": bill.host_bytes, " in files": bill.disk_bytes}
        return ", ".join(f"{count / 2**20:,.1f} MiB{where}" for where, count in parts.items() if count or not where)

    def _metrics(self, measured: Measured) -> StepMetrics:
        session = self._session
        per_second = measured.tokens / measured.total_s
        flops = session.flops_per_s(measured.steps, measured.total_s)
        fp16 = bool(session.optimizer.scaler_state())
        return StepMetrics(
            step=session.step,
            loss=measured.loss,
            learning_rate=measured.learning_rate,
            tokens=session.tokens,
            step_s=measured.total_s / measured.steps,
            tokens_per_s=per_second,
            data_wait=measured.data_wait_s / measured.total_s,
            # NCCL's wait() only orders streams: the process never stands still there.
            communication=None if self._on_cuda else measured.communication_s / measured.total_s,
            peak_memory_bytes=measured.peak_memory_bytes,
            grad_norm=measured.grad_norm,
            tflops=flops / 1e12 if flops else None,
            **utilised(flops, session.executed, self._peak_flops),
            loss_scale=session.optimizer.loss_scale if fp16 else None,
            skipped_steps=session.optimizer.skipped_steps if fp16 else None,
            dropped_rows=0 if measured.load else None,
            **_expert_load(measured.load),
            **self._offload_rates(),
        )

    def _offload_rates(self) -> dict[str, float | None]:
        """Of drives and of updates on the CPU since the last log step; None where there were none."""
        before, self._usage = self._usage, self._engine.store.usage()

        def rate(amount: str, seconds: str) -> float | None:
            spent = self._usage[seconds] - before[seconds]
            return (self._usage[amount] - before[amount]) / spent / 1e9 if spent else None

        return {
            "disk_read_gb_s": rate("read_bytes", "read_s"),
            "disk_write_gb_s": rate("written_bytes", "write_s"),
            "cpu_step_gparam_s": rate("stepped_numel", "step_s"),
        }

    def _log(self, kind: str, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(kind, self._session.step, values)

    def _row(self, label: str, text: str) -> None:
        self._note(f"{label:<{LABEL}}{text}", LABEL)

    def _note(self, text: str, indent: int = 2) -> None:
        if self._console is not None:
            self._say(self._console.wrapped(text, indent))

    def _remark(self, text: str, loss: str = "") -> None:
        self._say(self._table.remark(self._session.step, loss, text))

    def _shortened(self, text: str, beside: int) -> str:
        room = (self._console.width if self._console is not None else 0) - beside
        return text if len(text) <= room else f"{text[: room - 4]} ..."

    def _say(self, text: str, *, needed: bool = False) -> None:
        if self._console is not None:
            self._console.say(without_passwords(text), needed=needed)


def _expert_load(load: Mapping[str, Load]) -> dict[str, float]:
    """Of all routers the worst imbalance and the mean entropy, of those that tell; nothing without experts."""
    if not load:
        return {}
    entropies = [each.entropy for each in load.values() if each.entropy is not None]
    entropy = {"router_entropy": sum(entropies) / len(entropies)} if entropies else {}
    return {"expert_imbalance": max(each.imbalance for each in load.values()), **entropy}


def _precision(config: Config) -> str:
    """Its name, and the dtypes that were given in place of its own."""
    given = config.precision.model_dump(exclude={"name"}, exclude_none=True)
    return ", ".join([config.precision.name, *(f"{state} {dtype}" for state, dtype in given.items())])


def _threads() -> str:
    return counted(torch.get_num_threads(), "thread")


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _saved(step: int) -> str:
    return f"step {step} is saved" if step else "nothing is saved"
