"""One rank of a training whose steps are timed: `python -m benchmarks.telemetry.rank MODE TIMES ARGUMENTS...`.

`off` leaves out the flight recorder and the records of steps; what the engine counts for its own promises stays. `half`
leaves them out of half of the steps, drawn alike on all ranks. `parts` times every second call of theirs, and a call of
nothing in place of the others.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_post_hook

from terrazzo import cli
from terrazzo.telemetry import StepRecorder
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.watchdog.rank_progress import LEFT
from terrazzo.train.report import RunReport

__all__: list[str] = []

_EVENTS = ("issued", "done", "waits", "waited", "phase", "unit_begins", "unit_ends", "moved")
_STEPS: list[tuple[type, str]] = [(RingRecorder, name) for name in (*_EVENTS, "step_done")]
_STEPS += [(StepRecorder, "step_done"), (StepRecorder, "take")]
_RECORDS = [(StepRecorder, "record"), (StepRecorder, "numbers"), (RunReport, "step_record")]
_WARM = 20
"""First steps, which do not count."""


_phase = RingRecorder.phase


def _nothing(*args: Any, **more: Any) -> dict[str, Any]:
    if LEFT in args:  # else the rank would seem to have died
        _phase(*args)
    return {}


class _Steps:
    """Processor seconds of each step, and whether telemetry was on in it."""

    def __init__(self, mode: str) -> None:
        self._kept = [(where, name, getattr(where, name)) for where, name in _STEPS]
        self._draw, self._half, self._on = random.Random(0), mode == "half", mode != "off"
        self._moments: list[tuple[float, float]] = []
        self.rows: list[tuple[float, float, bool]] = []
        if mode == "off":
            for where, name in _STEPS:
                setattr(where, name, _nothing)
            StepRecorder.record, RunReport.step_record = _nothing, _nothing  # type: ignore[method-assign, assignment]

    def ended(self) -> None:
        now = time.process_time(), time.thread_time()
        if self._moments:
            process, thread = (late - early for late, early in zip(now, self._moments[-1], strict=True))
            self.rows.append((process, thread, self._on))
        self._moments.append(now)
        if self._half:
            self._on = self._draw.random() < 0.5
            for where, name, kept in self._kept:
                setattr(where, name, kept if self._on else _nothing)


def _timed(took: dict[str, list[int]], where: type, name: str) -> None:
    """Have each call noted, in nanoseconds by the clock."""
    call: Callable[..., Any] = getattr(where, name)
    into, empty, now = took[f"{where.__name__}.{name}"], took["nothing"], time.perf_counter_ns
    turns = itertools.cycle((True, False))

    def timed(*args: Any, **more: Any) -> Any:
        timed, since = next(turns), now()
        found = (call if timed else _nothing)(*args, **more)
        (into if timed else empty).append(now() - since)
        return found if timed else call(*args, **more)

    setattr(where, name, timed)


def _main() -> None:
    mode, path, *arguments = sys.argv[1:]
    took: dict[str, list[int]] = defaultdict(list)
    if mode == "parts":
        for where, name in (*_STEPS, *_RECORDS):
            _timed(took, where, name)
    steps, warm = _Steps(mode), iter(range(_WARM))

    def ended(*_: Any) -> None:
        steps.ended()
        if next(warm, None) is not None:
            steps.rows.clear()
            for each in took.values():
                each.clear()

    register_optimizer_step_post_hook(ended)
    sys.argv = ["terrazzo", "train", *arguments]
    leave = os._exit

    def write(code: int) -> NoReturn:  # a rank ends so, without what `atexit` knows
        Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps({"rows": steps.rows, "took": took}))
        leave(code)

    os._exit = write  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    _main()
