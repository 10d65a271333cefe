"""`tz.telemetry.attach`: records of steps, and somebody who sees whether ranks stand still, for a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, Misuse
from terrazzo.exchange import timeout_s, together
from terrazzo.telemetry.display.verdict import Verdict, verdict_of
from terrazzo.telemetry.flight.folder import FlightRecorder
from terrazzo.telemetry.log.exit_note import forget_exit
from terrazzo.telemetry.log.records import lines_of, steps_of
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.sinks import JsonLines, Sink, TensorBoard
from terrazzo.telemetry.steps.step_recorder import StepRecorder
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.telemetry.watchdog.watched_rank import look_after

__all__ = ["Telemetry", "attach"]


class Telemetry:
    """Writes what `attach` asks for, on rank 0, until it is closed. Each record is in the file as soon as it is made.

    Args:
        recorder: of the model.
        sinks: where records go.
        every: steps between two records.
        first_step: steps that were made before.
        flight_recorder: where each exchange is recorded, on all ranks.
        stop_looking: has nobody look after this rank any more.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        sinks: list[Sink],
        every: int,
        first_step: int,
        flight_recorder: FlightRecorder,
        stop_looking: Callable[[], None] | None,
    ) -> None:
        self._recorder, self._sinks, self._every, self._step = recorder, sinks, every, first_step
        self._flight_recorder = flight_recorder
        self._stop_looking = stop_looking
        self._handle: Any = None
        self._path = next((sink.path for sink in sinks if isinstance(sink, JsonLines)), None)

    def follow(self, optimizer: Optimizer) -> None:
        """Count the steps of this optimizer."""
        self._handle = optimizer.register_step_post_hook(lambda *_: self._step_done())

    def _step_done(self) -> None:
        self._step += 1
        self._recorder.step_done()
        self._flight_recorder.events.step_done(self._step)
        if self._step % self._every == 0:
            record = self._recorder.record()
            for sink in self._sinks:
                sink.log("step", self._step, record)

    def verdict(self) -> Verdict | None:
        """What bounds the step, of all records so far; at any step, and after `close`.

        Returns:
            On rank 0, whose records these are; `str()` of it is one sentence. None on other ranks, and before there is
            a record.
        """
        return None if self._path is None else verdict_of(steps_of(lines_of(self._path)))

    def close(self) -> None:
        """Write no more; what is in the files stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if self._stop_looking is not None:
            self._stop_looking()
        self._flight_recorder.close()


def attach(  # structure: signature fixed by what the records of a run have
    model: nn.Module,
    folder: str | Path,
    *,
    every: int = 10,
    micro_batches: int = 1,
    first_step: int = 0,
    tensorboard: bool = False,
    stall_s: float | None = 20.0,
) -> Telemetry:
    """Write a record of where the time of steps goes into `folder/metrics.jsonl`, on rank 0. Collective.

    Each rank also records the newest exchanges in memory, for `terrazzo trace folder`, and leaves them in
    `folder/flight` when it ends. A process of its own on each machine looks whether they
    stand still: one that does inside of a step, for good, is named, what all were doing is kept in `folder/stall`, and
    they are ended with exit code 81. What a loop does between steps may last; see `docs/guides/slow-runs.md`.

    A step ends when the model's optimizer has stepped, the last of several. The record is the mean of the steps since
    the last one; `docs/concepts/step-record.md` has its fields. Nothing of what the model computes changes, and ranks
    exchange nothing more.

    Args:
        model: sharded, with its optimizer.
        folder: is made if it is not there.
        every: steps between two records.
        micro_batches: of a step on this rank, for what the record has of promises.
        first_step: steps of the run that were made before, where it goes on in the folder of its earlier records: those
            of later steps are dropped.
        tensorboard: write event files to `folder/tensorboard`, too.
        stall_s: seconds in which nothing happens, and five times a phase's longest, after which ranks stand still;
            None: nobody looks after them.

    Returns:
        What `close()` ends; it may be dropped otherwise.

    Raises:
        BadInput: the folder cannot be written, or has records and `first_step` is 0; a number is too small; on all
            ranks.
        Misuse: the model is not sharded, or has no optimizer.
    """
    engine = engine_of(model)
    if not engine.optimizers:
        raise Misuse(
            "tz.telemetry.attach needs an optimizer, whose steps it counts: give one to tz.shard, or call tz.attach"
            " before."
        )
    for name, number in (("every", every), ("micro_batches", micro_batches)):
        if number < 1:
            raise BadInput(f"tz.telemetry.attach was given {name}={number}: use 1 or more.")
    if stall_s is not None and not stall_s > 0:
        raise BadInput(f"tz.telemetry.attach was given stall_s={stall_s}: use seconds above 0, or None for no limit.")
    if first_step < 0:
        raise BadInput(f"tz.telemetry.attach was given first_step={first_step}: use 0 or more.")
    there = RunFolder(Path(folder))
    events = there.tensorboard if tensorboard else None
    sinks = together(lambda: _sinks(there.metrics, events, first_step) if dist.get_rank() == 0 else [], BadInput)
    flight_recorder = FlightRecorder(dist.get_rank(), dist.get_world_size())
    flight_recorder.follow(engine, Path(folder))
    stop_looking = None
    if stall_s is not None:
        stop_looking = look_after(flight_recorder, Patience(stall_s, timeout_s(), own_loop=True))
    telemetry = Telemetry(StepRecorder(engine, micro_batches), sinks, every, first_step, flight_recorder, stop_looking)
    telemetry.follow(engine.optimizers[-1])
    return telemetry


def _sinks(path: Path, events: Path | None, first_step: int) -> list[Sink]:
    """Where rank 0 writes to; of which all hear where it cannot."""
    _claim(path, is_new=first_step == 0)
    others = [] if events is None else [TensorBoard(events, first_step)]  # may fail: before a file is open
    lines = JsonLines(path, first_step)
    if first_step:
        lines.log("begin", first_step, {"ranks": dist.get_world_size()})
    return [lines, *others]


def _claim(path: Path, is_new: bool) -> None:
    """Refuse a file that cannot be written, or holds another run's records; how an earlier start ended is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if is_new and path.stat().st_size:
            raise BadInput(
                f"tz.telemetry.attach found records of an earlier run in '{path}', which it would replace: give it "
                "another folder, the first_step of a run that goes on, or remove them."
            )
        forget_exit(path.parent)
    except OSError as error:
        raise BadInput(
            f"tz.telemetry.attach cannot write '{path}' ({error.strerror or error}): give it a folder that rank 0 can"
            " write into."
        ) from error
