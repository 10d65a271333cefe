"""`tz.telemetry.attach`: step records, the flight recorder and the watchdog, for a training loop of the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from terrazzo.engine import Engine, engine_of
from terrazzo.engine.instrumentation.recorder import SILENT
from terrazzo.errors import BadInput, Misuse
from terrazzo.exchange import require_alike, timeout_s, together
from terrazzo.given_numbers import is_count, is_number
from terrazzo.telemetry.flight.folder import FlightRecorder
from terrazzo.telemetry.log.exit_note import forget_exit
from terrazzo.telemetry.log.records import lines_of, steps_of
from terrazzo.telemetry.log.run_folder import RunFolder
from terrazzo.telemetry.log.sinks import JsonLines, Sink, TensorBoard
from terrazzo.telemetry.steps.step_recorder import StepRecorder
from terrazzo.telemetry.verdict.verdict import Verdict, verdict_of
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.telemetry.watchdog.watched_rank import look_after

__all__ = ["Telemetry", "attach"]


class Telemetry:
    """Writes step records on rank 0 until it is closed; see `attach`. Each is in the file as soon as it is made.

    Args:
        recorder: measures the steps of the model.
        sinks: the files that records go to; empty on all ranks but the first.
        every: steps between two records.
        first_step: steps that earlier starts of the run have made.
        flight_recorder: records each exchange, on all ranks.
        stop_looking: ends the watchdog's look at this rank; None where there is no watchdog.
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
        self._engine: Engine | None = None
        self._handles: list[Any] = []
        self._ends: Any = None  # the optimizer whose step ends one of the loop's
        self._path = next((sink.path for sink in sinks if isinstance(sink, JsonLines)), None)

    def follow(self, engine: Engine) -> None:
        """Count the steps of that of this engine's optimizers which steps first."""
        self._engine = engine
        self._handles = [each.register_step_post_hook(self._stepped) for each in engine.optimizers]

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._ends = optimizer if self._ends is None else self._ends
        if optimizer is self._ends:
            self._step_done()

    def _step_done(self) -> None:
        self._step += 1
        self._recorder.step_done()
        self._flight_recorder.events.step_done(self._step)
        if self._step % self._every == 0:
            record = self._recorder.record()
            for sink in self._sinks:
                sink.log("step", self._step, record)

    def verdict(self) -> Verdict | None:
        """What bounds the step, by all records so far. May be called at any step, and after `close`.

        Returns:
            The verdict on rank 0, which has the records; `str()` of it is one sentence. None on other ranks, and before
            the first record.
        """
        return None if self._path is None else verdict_of(steps_of(lines_of(self._path)))

    def close(self) -> None:
        """Stop writing and watching. What has been written stays."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._ends = [], None
        if self._engine is not None:
            self._flight_recorder.events.leave(self._engine)  # a later phase would say that the rank has not left
            self._engine = None
        for sink in self._sinks:
            sink.log("end", self._step, {})
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
    """Write where the time of steps goes into `folder/metrics.jsonl`, on rank 0. Collective.

    Each rank also keeps its newest exchanges in memory, for `terrazzo trace folder`, and leaves them in `folder/flight`
    when it ends. A separate process on each machine watches whether ranks stand still. If one hangs within a step, it
    is named, what all ranks were doing is kept in `folder/stall`, and they are ended with exit code 81. What the loop
    does between steps may take any time; see `docs/guides/slow-runs.md`.

    A step ends when the model's optimizer has stepped; of several, the one that steps first, as in `terrazzo profile`.
    A record is the mean of the steps since the record before; `docs/concepts/step-record.md` describes its fields. What
    the model computes does not change, and no step has another exchange for it.

    Args:
        model: sharded, with its optimizer.
        folder: is made if it does not exist.
        every: steps between two records.
        micro_batches: in a step on this rank, for the promises in the record.
        first_step: steps that the run made before this start, if it continues in the folder of its earlier records:
            records of later steps are dropped.
        tensorboard: write event files to `folder/tensorboard`, too.
        stall_s: seconds after which ranks in which nothing happens are taken to stand still, or five times the longest
            instance of the phase they are in, if that is more; None for no watchdog.

    Returns:
        An object whose `close()` ends it all. It need not be kept.

    Raises:
        BadInput: the folder cannot be written, or has records and `first_step` is 0; a number is too small. Raised on
            all ranks.
        Misuse: the model is not sharded, has no optimizer, or is recorded already.
        RanksApart: on all ranks, where these were told differently: all but `micro_batches`, which are a rank's own.
    """
    engine = engine_of(model)

    def check() -> None:
        _check_model(engine)
        _check_numbers(every, micro_batches, first_step, stall_s)
        _check_stages(engine, micro_batches)

    there = RunFolder(Path(folder))
    events = there.tensorboard if tensorboard else None
    together(check, BadInput)
    given = {"folder": f"'{folder}'", "every": every, "first_step": first_step, "tensorboard": bool(tensorboard)}
    given["stall_s"] = None if stall_s is None else float(stall_s)
    require_alike({name: str(value) for name, value in given.items()})
    sinks = together(lambda: _sinks(there.metrics, events, first_step) if dist.get_rank() == 0 else [], BadInput)
    flight_recorder = FlightRecorder(dist.get_rank(), dist.get_world_size())
    flight_recorder.follow(engine, Path(folder))
    stop_looking = None
    if stall_s is not None:
        stop_looking = look_after(flight_recorder, Patience(stall_s, timeout_s(), own_loop=True))
    telemetry = Telemetry(StepRecorder(engine, micro_batches), sinks, every, first_step, flight_recorder, stop_looking)
    telemetry.follow(engine)
    return telemetry


def _check_model(engine: Engine) -> None:
    if not engine.optimizers:
        raise Misuse(
            "tz.telemetry.attach needs an optimizer, whose steps it counts: give one to tz.shard, or call tz.attach"
            " before."
        )
    if engine.tally.recorder is not SILENT:
        raise Misuse(
            "tz.telemetry.attach was given a model that is recorded already: call close() of what the attach before"
            " has returned, or leave this call out."
        )


def _check_numbers(every: int, micro_batches: int, first_step: int, stall_s: float | None) -> None:
    for name, number in (("every", every), ("micro_batches", micro_batches)):
        if not is_count(number):
            raise BadInput(f"tz.telemetry.attach was given {name}={number}: use 1 or more.")
    if stall_s is not None and not (is_number(stall_s) and stall_s > 0):
        raise BadInput(f"tz.telemetry.attach was given stall_s={stall_s!r}: use seconds above 0, or None for no limit.")
    if not is_count(first_step, least=0):
        raise BadInput(f"tz.telemetry.attach was given first_step={first_step}: use 0 or more.")


def _check_stages(engine: Engine, micro_batches: int) -> None:
    if micro_batches < (stages := engine.axes.size(engine.axes.stage_axis)):
        raise BadInput(
            f"tz.telemetry.attach was given micro_batches={micro_batches} of a pipeline of {stages} ranks, which a step"
            f" of fewer than {stages} does not fill: give the number that a step of your loop has."
        )


def _sinks(path: Path, events: Path | None, first_step: int) -> list[Sink]:
    """The files that rank 0 writes. `attach` raises an error of these on all ranks."""
    _claim(path, is_new=first_step == 0)
    others = [] if events is None else [TensorBoard(events, first_step)]  # may fail: before a file is open
    lines = JsonLines(path, first_step)
    if first_step:
        lines.log("begin", first_step, {"ranks": dist.get_world_size()})
    return [lines, *others]


def _claim(path: Path, is_new: bool) -> None:
    """Refuse a file that cannot be written, or has another run's records; remove the note of how a run ended there."""
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
