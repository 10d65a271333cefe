"""Updates away from the device: each unit's states are stepped where they rest, on a thread of its own.

The optimizer's own code runs, on a stepper that holds one segment and the hyper-parameters of the moment the step
began: the user may go on to change them. Of matrices that an optimizer needs whole only their elementwise part is done
here, and the step waits for it. States on `nvme` stream through a few buffers, cell by cell: the next cells are
read while one is stepped and earlier ones are written. The order of everything is fixed and each element's arithmetic
is the same, so the bits are those of a step on the spot.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.offload.nvme.staging import StagingBuffer
from terrazzo.engine.offload.store import Store
from terrazzo.engine.optim.segments.off_device_updates import SegmentWork, Uses
from terrazzo.engine.optim.segments.segment import Segment, give_gradient
from terrazzo.engine.optim.segments.segment_step import step_segment
from terrazzo.engine.optim.segments.state_memory import StateMemory
from terrazzo.engine.optim.stock.stepper import Stepper
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.runtime.device import Stream, set_current
from terrazzo.engine.runtime.topology import bind_to
from terrazzo.engine.runtime.worker import Job, again, without_frames
from terrazzo.processes.ending import require_own, start_thread

__all__ = ["ElementwiseStep", "Updater"]


@dataclass
class _Task:
    """Some segments of one bucket that are stepped together; those on `nvme` share a cell.

    Attributes:
        segments: all of the cell.
        due: those of them that `work` is done to, and whether they have a gradient; the others are left alone.
        kept: what the optimizer keeps, by parameter of a segment.
        mark: the point of computation from which on the weights may be changed.
        done: ends once the unit's last task is carried out.
    """

    bucket: Bucket
    window: Range
    segments: Sequence[Segment]
    due: Mapping[Segment, bool]
    work: SegmentWork
    kept: Mapping[Tensor, dict[str, Any]]
    finished: SummedGradient | None
    mark: torch.Event | None
    done: Job | None = None
    staging: StagingBuffer | None = None


@dataclass
class _Flush:
    """Asks for the end of everything that is being written."""

    done: Job = field(default_factory=Job)


class Updater:
    """Carries out updates in the order they are asked for; its thread ends with the object."""

    def __init__(self, store: Store) -> None:
        buffers = [StagingBuffer(raw) for raw in store.staging()]
        self._store, self._process = store, os.getpid()
        self._tasks: queue.SimpleQueue[_Task | _Flush | None] = queue.SimpleQueue()
        work = _UpdateThread(store, buffers, self._tasks)
        threads, cpus = store.step_threads
        start_thread("terrazzo-update", lambda: _run_updates(work, threads, cpus), work.stop)

    def __del__(self) -> None:
        self._tasks.put(None)

    def begin(
        self,
        work: SegmentWork,
        segments: Mapping[Bucket, Sequence[Segment]],
        stepped: Mapping[Segment, bool],
        kept: Mapping[Tensor, dict[str, Any]],
        finished: Mapping[Bucket, SummedGradient],
    ) -> Job:
        """Start `work`; the job ends when its new weights can be used.

        Args:
            segments: all of the buckets in question.
            stepped: those of them that it is done to, and whether they have a gradient.
            kept: what the optimizer keeps, by parameter of a segment.
            finished: the gradients of buckets.
        """
        require_own(self._process)
        mark = Stream.current(self._store.device).mark()
        tasks = []
        for segment in stepped if work.uses.moments else ():
            segment.take_over_states(kept.get(segment.parameter) or {})
        for bucket, held in segments.items():
            for window, among in _by_window(held).items():
                if due := {segment: stepped[segment] for segment in among if segment in stepped}:
                    tasks.append(_Task(bucket, window, among, due, work, kept, finished.get(bucket), mark))
        done = Job()
        if not tasks:  # the unit is published all the same: other ranks may have some
            done.set_result(None)
            return done
        tasks[-1].done = done
        for task in tasks:
            self._tasks.put(task)
        return done

    def flush(self) -> Job:
        """Ends when everything asked for so far has been carried out and written."""
        require_own(self._process)
        flush = _Flush()
        self._tasks.put(flush)
        return flush.done


def _by_window(segments: Sequence[Segment]) -> dict[Range, list[Segment]]:
    windows: dict[Range, list[Segment]] = {}
    for segment in segments:
        windows.setdefault(segment.window, []).append(segment)
    return windows


def _run_updates(work: _UpdateThread, threads: int, cpus: Collection[int]) -> None:
    torch.set_num_threads(threads)
    set_current(work.device)
    if cpus:
        bind_to(cpus)
    with torch.no_grad():
        work.run()


class _UpdateThread:
    """The work of the thread, which must not hold the `Updater`: it waits for the end of that."""

    def __init__(
        self, store: Store, buffers: list[StagingBuffer], tasks: queue.SimpleQueue[_Task | _Flush | None]
    ) -> None:
        self._store, self._ring, self._tasks, self.device = store, deque(buffers), tasks, store.device
        self._ahead: deque[_Task | _Flush] = deque()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """The process exits: begin nothing more."""
        self._failure = self._failure or RuntimeError("The process exits: this update is not carried out any more.")
        self._tasks.put(None)

    def run(self) -> None:
        while self._look_ahead():
            task = self._ahead.popleft()
            done = task.done
            try:
                if self._failure is not None:
                    raise again(self._failure)
                self._carry_out(task)
            except BaseException as error:
                self._fail(error)
                if done is not None:
                    done.set_exception(without_frames(error))
            else:
                if done is not None:
                    done.set_result(None)
            del task, done

    def _fail(self, error: BaseException) -> None:
        """States are torn: nothing may be stepped any more, and transfers that failed hold what they were for."""
        self._failure = again(error)
        self._ring.clear()

    def _look_ahead(self) -> bool:
        """Start reading for what comes next, half the buffers ahead; False at the end."""
        while len(self._ahead) <= len(self._ring) // 2:
            try:
                task = self._tasks.get(block=not self._ahead)
            except queue.Empty:
                return True
            if task is None:
                return False
            if isinstance(task, _Task) and self._failure is None:
                try:
                    self._start_reading(task)
                except BaseException as error:
                    self._fail(error)
            self._ahead.append(task)
        return True

    def _start_reading(self, task: _Task) -> None:
        if task.bucket.spec.tiers.optim != "nvme":
            return
        for staging in self._ring:
            if staging.holds(task.bucket, task.window):
                staging.finish_writing()
        staging = self._ring.popleft()
        self._ring.append(staging)
        staging.finish_writing()
        states = [task.kept.get(segment.parameter, {}) for segment in task.segments]
        known = [key for key in task.bucket.moments if any(key in state for state in states)]
        staging.read(task.bucket, task.window, known, task.finished, task.work.uses)
        task.staging = staging

    def _carry_out(self, task: _Task | _Flush) -> None:
        if isinstance(task, _Flush):
            for staging in self._ring:
                staging.finish_writing()
            return
        if task.staging is not None:
            task.staging.finish_reading()
        if task.mark is not None:
            task.mark.synchronize()  # what was queued before may still read weights in host memory
        with self._store.copies_in.completing(task.mark):
            for segment, has_gradient in task.due.items():
                self._step(segment, task, has_gradient)
        if task.staging is not None:
            if "weight" in task.staging:
                task.staging.part("weight", task.window).copy_(task.staging.part("master", task.window))
            task.staging.write()
            if task.done is not None:
                self._finish_weights(task.bucket)

    def _finish_weights(self, bucket: Bucket) -> None:
        """New weights on `nvme` are complete before anyone reads them."""
        if bucket.spec.tiers.weight == "nvme":
            for staging in self._ring:
                staging.finish_writing()

    def _step(self, segment: Segment, task: _Task, has_gradient: bool) -> None:
        started, staging, work = time.perf_counter(), task.staging, task.work
        memory = StateMemory(segment) if staging is None else _StagedStates(segment, staging)
        gradient = self._gradient(segment, task) if has_gradient and work.uses.moments else None
        if not work.uses.weights:
            work.run(segment, memory, None, gradient)
            return
        values = segment.parameter.detach() if staging is None else staging.part("master", segment.range)
        work.run(segment, memory, values, gradient)
        weight = segment.bucket.own_weight
        if weight is not None and (staging is None or "weight" not in staging):
            with weight.opened(segment.range, "replace") as own:
                self._store.sending.copy(values, own)
        self._store.updates.took(values, started)

    def _gradient(self, segment: Segment, task: _Task) -> Tensor:
        assert task.finished is not None, "there is a gradient"
        if task.staging is None or "grad" not in task.staging:
            return segment.gradient(task.finished)
        part = task.staging.part("grad", segment.range)
        return task.finished.scaled(part).to(segment.grad_dtype)


class ElementwiseStep:
    """Steps a segment with an optimizer's own code."""

    uses = Uses()

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def run(self, segment: Segment, memory: StateMemory, values: Tensor | None, gradient: Tensor | None) -> None:
        assert values is not None, "it uses weights"
        parameter = nn.Parameter(values)
        give_gradient(parameter, gradient)
        step_segment(self._stepper, segment, parameter, memory)


class _StagedStates(StateMemory):
    """States on `nvme`, of which a cell is in a staging buffer."""

    def __init__(self, segment: Segment, staging: StagingBuffer) -> None:
        super().__init__(segment)
        self._staging = staging

    def part(self, key: str, elements: Range) -> Tensor:
        return self._staging.part(key, elements)

    def remainder(self, elements: Range) -> Tensor:
        return self._staging.part("remainder", elements)

    def keep(self, key: str) -> None:
        self._staging.keep(key)
