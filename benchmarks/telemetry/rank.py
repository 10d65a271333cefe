"""One rank of a training whose steps are timed: `python -m benchmarks.telemetry.rank on|off TIMES ARGUMENTS...`.

`off` leaves out the flight recorder and the records of steps; what the engine counts for its own promises stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_post_hook

from terrazzo import cli
from terrazzo.telemetry import StepRecorder
from terrazzo.telemetry.flight.recorder import Recorded
from terrazzo.train.report import Report

__all__: list[str] = []


def _leave_out() -> None:
    def nothing(*args: Any, **more: Any) -> None: ...

    for name in ("follow", "step_done", "phase"):
        setattr(Recorded, name, nothing)
    for name in ("step_done", "take"):
        setattr(StepRecorder, name, nothing)
    Report.step_record = nothing  # type: ignore[method-assign]
    StepRecorder.record = lambda self: {}  # type: ignore[method-assign]


def _main() -> None:
    mode, path, *arguments = sys.argv[1:]
    moments: list[tuple[float, float]] = []
    register_optimizer_step_post_hook(lambda *_: moments.append((time.perf_counter(), time.process_time())))
    if mode == "off":
        _leave_out()
    sys.argv = ["terrazzo", "train", *arguments]
    leave = os._exit

    def write(code: int) -> NoReturn:  # a rank ends so, without what `atexit` knows
        Path(f"{path}.{os.environ['RANK']}").write_text(json.dumps(moments))
        leave(code)

    os._exit = write  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    _main()
