"""What a run says: its header, its log steps, and the summary that holds the plan's promises against measurements."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terrazzo.config import Config, without_passwords
from terrazzo.engine import Traffic, engine_of
from terrazzo.engine.process import device as devices
from terrazzo.planner.machine.devices import this_machine
from terrazzo.telemetry import Console, JsonLines, Sink, StepMetrics, TensorBoard
from terrazzo.train.evaluate import Validation
from terrazzo.train.plan import build_precision
from terrazzo.train.promise.as_setup import matmul_format
from terrazzo.train.promise.summary import Pace, mfu, summarize, summary_lines
from terrazzo.train.session import Session

__all__ = ["Measured", "Report"]


@dataclass(frozen=True)
class Measured:
    """What the loop measured since the previous log step, on this rank."""

    loss: float
    grad_norm: float
    steps: int
    tokens: int
    total_s: float
    data_wait_s: float
    communication_s: float
    peak_memory_bytes: int


def peak_flops(config: Config) -> float | None:
    """Per second, of this machine's device in the format that the run computes in; None where it is not known."""
    return this_machine().device.peak_flops.get(matmul_format(build_precision(config)))


class Report:
    """Everything that is said and written. Every rank has one; only rank 0's has a screen and files."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._engine = engine_of(session.model)
        self._bill = self._engine.memory_bill(session.micro_batches)
        self._console = Console(session.config.train.steps, session.step) if session.ranks.is_first else None
        self._sinks: list[Sink] = []
        self._metrics_file: JsonLines | None = None
        self._start = time.perf_counter()
        self._traffic: dict[str, int] = {}  # bytes of the newest step, by kind of collective
        self._pace, self._peak_bytes = Pace(), 0
        self._usage = self._engine.usage()  # of memory and files beside the device, at the last log step
        self._first_validation: Validation | None = None
        self._last_validation: Validation | None = None
        self._last_sample = ""
        self._on_cuda = devices.is_cuda(session.ranks.device)
        self._peak_flops = peak_flops(session.config) if self._on_cuda else None
        if session.ranks.is_first and session.step < session.config.train.steps:
            self._open()  # else nothing is left to be done, and what was written of it stays as it is

    def _open(self) -> None:
        session, log = self._session, self._session.config.log
        config = without_passwords(session.config.model_dump(mode="json"))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (log.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        self._metrics_file = JsonLines(log.folder / "metrics.jsonl", session.step)
        self._sinks.append(self._metrics_file)
        if log.tensorboard:
            self._sinks.append(TensorBoard(log.folder / "tensorboard", session.step))

    def lost(self) -> str | None:
        """What has become of the log folder, if its files are no longer where they were begun; rank 0 looks."""
        if self._metrics_file is None or self._metrics_file.in_place():
            return None
        return f"the log folder '{self._session.config.log.folder}' (log.folder), or metrics.jsonl in it,"

    def begin(self) -> None:
        """The header: what is about to run."""
        session, ranks = self._session, self._session.ranks
        numel = sum(parameter.numel() for parameter in session.model.parameters())
        learnt = sum(parameter.numel() for parameter in session.model.parameters() if parameter.requires_grad)
        of_them = "" if learnt == numel else f" ({learnt / 1e6:.2f} M trained)"
        batch = session.config.batch
        count = session.micro_batches
        micro = f"{count} micro-batch{'es' if count > 1 else ''} per rank"
        self._say(
            f"{type(session.model).__name__}, {numel / 1e6:.2f} M parameters{of_them}, {ranks.world_size} ×"
            f" {ranks.device.type} | {batch.global_batch} × {batch.sequence_length} tokens per step in {micro} |"
            f" {session.data.train.tokens_numel:,} training tokens"
        )
        if session.data.skipped.names:
            self._say(f"data: {session.data.skipped}")
        for note in session.data.notes:
            self._say(f"data: {note}")
        self._say(f"{self._engine.describe()}\n{self._bill.table()}")
        for note in session.notes:
            self._say(note)
        if session.step:
            self._say("\n".join([f"resumed at step {session.step}", *session.resume_notes]))

    def log_step(self, measured: Measured) -> None:
        """A log step."""
        self._pace.add(measured.steps, measured.tokens, measured.total_s)
        self._peak_bytes = measured.peak_memory_bytes
        metrics = self._metrics(measured)
        self._log("train", metrics.as_dict())
        self._say(metrics.line(self._session.config.train.steps))

    def validation(self, found: Validation | None) -> None:
        """A validation loss."""
        if found is None:
            return
        self._first_validation = self._first_validation or found
        self._last_validation = found
        self._log("validation", asdict(found))
        self._say(
            f"step {self._session.step} | validation loss {found.loss:.4f} | {found.bits_per_byte:.4f} bits per byte"
        )

    def sample(self, text: str) -> None:
        """A text sample."""
        self._log("sample", {"text": text})
        indented = "\n".join(f"    {line}" for line in text.strip("\n").split("\n"))
        self._last_sample = f"sample at step {self._session.step}:\n{indented}"
        if self._session.step < self._session.config.train.steps:  # the last one closes the summary
            self._say(self._last_sample)

    def saved(self, path: str) -> None:
        """A checkpoint was written, or will be in the background."""
        self._say(f"{'saving' if self._session.config.checkpoint.background else 'saved'} {path}")

    def exported(self, path: Path) -> None:
        """A Hugging Face folder was written."""
        self._say(f"exported {path}")

    def step_done(self, traffic: Traffic) -> None:
        """An optimizer step was made with this traffic."""
        self._traffic = dict(traffic.bytes)
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
        session, seconds = self._session, time.perf_counter() - self._start
        summary = summarize(session, self._traffic, self._pace, self._peak_bytes, self._peak_flops)
        self._log("summary", summary)
        state = "stopped on request and saved" if stopped else "done"
        if stopped and session.config.checkpoint.resume != "never":
            state += ", start the same command again to continue"
        self._say(f"\n{state}: step {session.step} of {session.config.train.steps}, {seconds:.0f} s")
        for line in self._summary_lines(summary):
            self._say(line)
        if self._last_sample and not stopped:
            self._say(f"\n{self._last_sample}\n")
        if session.config.log.note:
            self._say(session.config.log.note)
        self.leave()

    def leave(self) -> None:
        """The end of the screen and of all files, with nothing more to say."""
        if self._console is not None:
            self._console.close()
        for sink in self._sinks:
            sink.close()

    def _say_nothing_left(self) -> None:
        """Of a finished run that was started again: there is nothing that was measured."""
        session = self._session
        self._say(
            f"\nnothing left to do: step {session.step} of {session.config.train.steps} is in {session.keeper.folder}."
            " To go on from there: a larger train.steps. To begin anew: another log.folder, or checkpoint.resume=never"
            " with checkpoint.overwrite=true."
        )

    def _summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        first, last = self._first_validation, self._last_validation
        lines = [self._engine.describe(), self._bill.table(), *summary_lines(summary)]
        if first is not None and last is not None and first is not last:
            lines.append(f"validation: {first.bits_per_byte:.4f} → {last.bits_per_byte:.4f} bits per byte")
        log = self._session.config.log
        curves = f" | curves: tensorboard --logdir {log.folder / 'tensorboard'}" if log.tensorboard else ""
        lines.append(f"metrics: {log.folder / 'metrics.jsonl'}{curves}")
        lines.append(f"checkpoints: {self._session.config.checkpoint_folder}")
        return lines

    def _metrics(self, measured: Measured) -> StepMetrics:
        session = self._session
        per_second = measured.tokens / measured.total_s
        flops = session.flops_per_s(measured.steps, measured.total_s)
        fp16 = bool(session.optimizer.scaler_state())
        return StepMetrics(
            step=session.step,
            loss=measured.loss,
            learning_rate=session.optimizer.param_groups[0]["lr"],
            tokens=session.tokens,
            step_s=measured.total_s / measured.steps,
            tokens_per_s=per_second,
            data_wait=measured.data_wait_s / measured.total_s,
            # NCCL's wait() only orders streams: the process never stands still there.
            communication=None if self._on_cuda else measured.communication_s / measured.total_s,
            peak_memory_bytes=measured.peak_memory_bytes,
            grad_norm=measured.grad_norm,
            tflops=flops / 1e12 if flops else None,
            mfu=mfu(flops, self._peak_flops),
            loss_scale=session.optimizer.loss_scale if fp16 else None,
            skipped_steps=session.optimizer.skipped_steps if fp16 else None,
            **self._offload_rates(),
        )

    def _offload_rates(self) -> dict[str, float | None]:
        """Of drives and of updates on the CPU since the last log step; None where there were none."""
        before, self._usage = self._usage, self._engine.usage()

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

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.say(without_passwords(text))
