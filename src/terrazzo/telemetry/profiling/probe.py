"""Measures the steps of a training script from within its process.

It needs only the standard library and torch, and is loaded by its path. Each rank writes a line per step, with the time
in each phase and each wait for others; `merging` compares these between ranks.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["EVERY", "ScriptProbe"]

EVERY = 10
"""Steps in a record. The first step has a record of its own, as it includes what is done only once."""

_MOST_WORKS = 10_000
_now = time.monotonic_ns


class ScriptProbe:
    """Measures one process. It writes nothing before the first step, so that launchers and workers leave no file.

    Args:
        folder: gets a file for each rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.facts: dict[str, Any] = {"compiles": False, "autocasts": False}
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.begin()

    def begin(self) -> None:
        """Start from zero; also called in a forked process."""
        self._file: Any = None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._inside = threading.local()
        self._phase, self._since, self._in_phase = "other", _now(), False
        self._seconds, self._waited = defaultdict[str, int](int), defaultdict[str, int](int)
        self._waits: list[list[Any]] = []
        self._works: dict[int, list[Any]] = {}
        self._ordinals = defaultdict[tuple[str, str], int](int)
        self._step, self._looks, self._empty = 0, 0, 0
        self._first: int | None = None
        self._written_facts: dict[str, Any] = {}
        self._engines: dict[int, Any] = {}
        self._sharded: Any = None
        self._ends: dict[int, int] = {}
        self.on_cuda = False

    # -- phases ----------------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        return threading.get_ident() == self._thread

    def turn(self, phase: str) -> None:
        """A new phase begins; ignored within `during`."""
        if self.is_main and not self._in_phase:
            self._turn(phase)

    def _turn(self, phase: str) -> None:
        now = _now()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: str, then: str | None = None) -> Iterator[None]:
        """All that happens inside belongs to this phase; afterwards the phase before continues, or `then` begins."""
        if not self.is_main or self._in_phase:
            yield
            return
        before = self._phase
        self._turn(phase)
        self._in_phase = True
        sharded = self._sharded is not None and phase in ("input", "save")
        try:
            with self._sharded.phases.during(phase) if sharded else nullcontext():
                yield
        finally:
            self._in_phase = False
            self._turn(then or before)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reading the next batch. Without gradients it is part of an evaluation."""
        trains = torch.is_grad_enabled()
        with self.during("input" if trains else "evaluate", "forward" if trains else "evaluate"):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward. The time since the last batch was the forward; without a batch, the time since the last step."""
        if self.is_main and not self._in_phase and self._phase == "other":
            self._phase = "forward"
        self._look()
        with self.during("backward", "other"):
            yield
            if self.is_main:
                for model in self.models:
                    self._reduced(model)

    def _reduced(self, model: Any) -> None:
        """Note how long a DDP model waited at the end of this backward, if it reduced gradients; its clock differs."""
        model.logger.set_runtime_stats_and_log()
        logged = model._get_ddp_logging_data()
        computed, ended = logged.get("backward_compute_time_end", 0), logged.get("backward_comm_time_end", 0)
        if ended and ended != self._ends.get(id(model)):
            self._ends[id(model)] = ended
            shift = _now() - time.time_ns()
            start, end = min(computed, ended) + shift, ended + shift
            self.waited(self.begun(model.process_group, "all_reduce", start), start, end)

    # -- exchanges -------------------------------------------------------------------------------------------------

    def exchange(self, kind: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a collective. Only the outermost counts, as torch's collectives call each other."""
        if getattr(self._inside, "exchange", False):
            return call(*args, **kwargs)
        group, start = _group_of(args, kwargs), _now()
        self._inside.exchange = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._inside.exchange = False
        wait = self.begun(group, kind, start)
        if isinstance(result, dist.Work):
            self._works.pop(id(result), None)  # of another one that is garbage by now
            self._works[id(result)] = wait
            if len(self._works) > _MOST_WORKS:  # the oldest are those that nobody waits for
                del self._works[next(iter(self._works))]
        else:
            self.waited(wait, start)
        return result

    def begun(self, group: Any, kind: str, start: int) -> list[Any]:
        """A new exchange as a list: group, ordinal there by kind, kind, ranks, when issued. A wait adds two times."""
        name, size = _named(group)
        self._ordinals[name, kind] += 1  # by kind: ranks of a group send to each other unequally often
        return [name, self._ordinals[name, kind], kind, size, start]

    def waited(self, wait: list[Any], start: int, end: int | None = None) -> None:
        """The script has waited for an exchange from `start` to `end`, by default until now."""
        end = _now() if end is None else end
        if self.is_main:
            self._waits.append([*wait, start, end])
            self._waited[self._phase] += end - start

    def wait(self, work: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `Work.wait`."""
        known, start = self._works.pop(id(work), None), _now()
        result = call(work, *args, **kwargs)
        if known is not None and not getattr(self._inside, "exchange", False):
            self.waited(known, start)
        return result

    # -- steps -----------------------------------------------------------------------------------------------------

    def updates(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        if self._first is None and self.is_main:
            self._first = id(optimizer)
            self.on_cuda = any(each.is_cuda for group in optimizer.param_groups for each in group["params"])
        self._look()
        self.turn("update")

    def updated(self, optimizer: Any) -> None:
        """An optimizer's step has ended. Of several optimizers the first one seen ends the training step."""
        self._look()
        self.turn("other")
        if self.is_main and id(optimizer) == self._first and not self._in_phase:
            self._end_step(optimizer)

    def _look(self) -> None:
        """Look whether the device has nothing to do, and so waits for the script."""
        if self.on_cuda and self.is_main and not torch._C._cuda_isCurrentStreamCapturing():
            self._looks += 1
            self._empty += torch.accelerator.current_stream().query()

    def _end_step(self, optimizer: Any) -> None:
        self._turn(self._phase)
        self._step += 1
        line: dict[str, Any] = {"step": self._step, "end": self._since}
        if (engine := self._engine(optimizer)) is None:
            line |= {"seconds": self._seconds, "waited": self._waited, "waits": self._waits, "looks": self._looks}
            line |= {"empty": self._empty, "memory": self._memory()}
        elif engine.record is not None:
            self._sharded = engine
            engine.record.step_done()
            if (self._step - 1) % EVERY == 0:
                line |= engine.snapshot()
        self._write(line)
        self._seconds, self._waited, self._waits = defaultdict(int), defaultdict(int), []
        self._looks = self._empty = 0

    def _memory(self) -> dict[str, int]:
        if not self.on_cuda:
            return {"peak": _peak_resident_bytes()}
        stats = torch.accelerator.memory_stats()
        return {
            "peak": stats.get("allocated_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.peak", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }

    def _engine(self, optimizer: Any) -> Any:
        """The counts of the optimizer's model if Terrazzo shards it, else None."""
        if "terrazzo.engine" not in sys.modules:
            return None
        if id(optimizer) not in self._engines:
            self._engines[id(optimizer)] = _Sharded.of(optimizer)
            if (sharded := self._engines[id(optimizer)]) is not None:
                self.facts |= {"terrazzo": True, "own": sharded.own}
        return self._engines[id(optimizer)]

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            rank, world = _place()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"rank-{rank:05}.jsonl").open("a", buffering=1 << 16)
            if self._file.tell():  # the script was started again, perhaps in the middle of a line
                self._file.write("\n")
            boot = Path("/proc/sys/kernel/random/boot_id")
            about: dict[str, Any] = {
                "rank": rank,
                "world": world,
                "here": int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            }
            about["restart"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
            about |= {"pid": os.getpid(), "host": socket.gethostname(), "on_cuda": self.on_cuda}
            about["boot"] = boot.read_text().strip() if boot.exists() else socket.gethostname()
            self._put({"begins": about})
            fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
            self.facts["fsdp"] = fsdp is not None and any(issubclass(type(each), fsdp) for each in gc.get_objects())
        if self._written_facts != self.facts:
            self._written_facts = dict(self.facts)
            self._put({"facts": self._written_facts})
        self._put(line)

    def _put(self, line: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk: the script goes on
            self._file.write(json.dumps(line) + "\n")
            if (self._step - 1) % EVERY == 0:
                self._file.flush()

    def flush(self) -> None:
        """Write all that has been measured."""
        if self._file is None or os.getpid() != self._pid:
            return
        if self._sharded is not None and (self._step - 1) % EVERY:
            self._put({"step": self._step, "end": _now(), **self._sharded.snapshot()})
        with suppress(OSError):
            self._file.flush()


class _Sharded:
    """The counts of a model that Terrazzo shards. `own`: the folder of the run, if it writes its own records."""

    record: Any

    def __init__(self, engine: Any) -> None:
        from terrazzo.telemetry.steps.step_recorder import StepRecorder

        table = getattr(engine.tally.recorder, "table", None)
        self.own = table and table.get("folder")
        self.record = None if table else StepRecorder(engine)
        self.phases = engine.tally.phases

    def snapshot(self) -> dict[str, Any]:
        """The record of the steps since the last one, and this rank's values to compare."""
        numbers = self.record.numbers()
        return {"skew": self.record.skew([numbers]), "record": self.record.record()}

    @classmethod
    def of(cls, optimizer: Any) -> _Sharded | None:
        from terrazzo.engine import Engine

        engines = [each for each in gc.get_objects() if type(each) is Engine]
        return next((cls(each) for each in engines if any(own is optimizer for own in each.optimizers)), None)


def _peak_resident_bytes() -> int:
    """This process's own peak (VmHWM). Linux counts the peak of whoever has started a process into its ru_maxrss."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _group_of(args: Any, kwargs: Any) -> Any:
    """The process group among a collective's arguments; None for all ranks."""
    if "group" in kwargs:
        return kwargs["group"]
    return next((each for each in args if isinstance(each, dist.ProcessGroup)), None)


def _named(group: Any) -> tuple[str, int]:
    """A group's name, which its ranks share (empty for all ranks), and its size."""
    if not dist.is_initialized():
        return "", 1
    size = dist.get_world_size(group)
    if group is None or group is dist.group.WORLD:
        return "", size
    described = str(getattr(group, "group_desc", "") or "").removeprefix("mesh_")
    return f"{described if described and described != 'undefined' else 'group'}#{group.group_name}", size


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
