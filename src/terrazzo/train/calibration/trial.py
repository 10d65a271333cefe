"""A few timed steps of a configuration, as `terrazzo train` would make them: what a calibration is made of.

`python -m terrazzo.train.calibration.trial CONFIG OUT [section.key=value ...]` starts the ranks of the configuration.
Each opens a run, makes steps, and does it again with sequences half as long, where ranks can share these, so that what
grows with the tokens can be told from what does not. Rank 0 writes the trials to OUT. Nothing is printed, logged or
saved.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from terrazzo.config import Config, load_config
from terrazzo.engine import engine_of
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.exchange import broadcast_json, gather_json
from terrazzo.launch.environment import is_rank
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.launcher_pipe import Milestone
from terrazzo.launch.machine import ranks_to_start
from terrazzo.launch.rank.process_group import join
from terrazzo.launch.rank.rank_process import RankProcess
from terrazzo.telemetry import PeakMemory
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.preflight.shared_axes import check_axes
from terrazzo.train.session.build_session import open_session
from terrazzo.train.session.session import Session
from terrazzo.train.steps.step import backward_on, update

__all__ = ["Trial"]

WARM_UP_STEPS = 2
LEAST_STEPS, MOST_STEPS, ENOUGH_S = 4, 20, 3.0


@dataclass(frozen=True)
class Trial:
    """What `steps` optimizer steps took. Seconds are medians of the steps, in the mean over ranks.

    Attributes:
        wait_s: that a rank stood waiting for collectives in a step; None on CUDA, where the device waits.
        traffic_bytes: that this rank sent in a step.
        peak_bytes: this rank's highest memory use since its process began; see `PeakMemory`.
    """

    sequence_length: int
    steps: int
    step_s: float
    wait_s: float | None
    traffic_bytes: int
    peak_bytes: int


def _run_trials(config: Config) -> list[Trial]:
    """Join the run, and measure with sequences of full length and, where there are such, of half that."""
    ranks = join(config.launch)
    trials = []
    for each in (config, *_with_half(config)):
        with open_session(each, ranks) as session:
            trials.append(_measure(session))
    dist.destroy_process_group()
    return trials


def _with_half(config: Config) -> list[Config]:
    """The configuration with sequences half as long; empty where its ranks could not share those."""
    length = config.batch.sequence_length // 2
    half = config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": length})})
    try:
        check_axes(half, ModelOnPaper(half))
    except BadInput:
        return []
    return [half] if length > 1 else []


def _measure(session: Session) -> Trial:
    memory, traffic = PeakMemory(session.ranks.device), engine_of(session.model).traffic
    for _ in range(WARM_UP_STEPS):
        _timed_step(session)
    steps: list[float] = []
    waits: list[float] = []
    while _goes_on(steps):
        steps.append(_timed_step(session))
        waits.append(traffic.total_wait_s)
    on_cuda = devices.is_cuda(session.ranks.device)
    return Trial(
        sequence_length=session.config.batch.sequence_length,
        steps=len(steps),
        step_s=_mean_over_ranks(statistics.median(steps)),
        wait_s=None if on_cuda else _mean_over_ranks(statistics.median(waits)),
        traffic_bytes=sum(sent for kind, sent in traffic.by_name().items() if kind != "control"),
        peak_bytes=memory.peak_bytes,
    )


def _timed_step(session: Session) -> float:
    batch = session.loader.next_step()
    start = time.perf_counter()
    backward_on(session, batch)
    update(session)
    devices.synchronize(session.ranks.device)
    return time.perf_counter() - start


def _goes_on(steps: list[float]) -> bool:
    """Until it is enough on rank 0: all ranks must make the same number of steps."""
    enough = len(steps) >= LEAST_STEPS and (sum(steps) >= ENOUGH_S or len(steps) >= MOST_STEPS)
    return not broadcast_json(enough)


def _mean_over_ranks(value: float) -> float:
    return statistics.fmean(gather_json(value))


def main() -> int:
    """The exit code. In a process that is a rank already, it does not return."""
    path, out, *overrides = sys.argv[1:]
    config = load_config(path, overrides)
    if is_rank():
        process = RankProcess(int(os.environ["RANK"]))
        process.run(lambda: _rank(process, config, Path(out)))
    words = ["-m", "terrazzo.train.calibration.trial", *sys.argv[1:]]
    return launch_ranks(LaunchSpec(ranks_to_start(config), words))


def _rank(process: RankProcess, config: Config, out: Path) -> int:
    process.reach(Milestone.READY)
    trials = _run_trials(config)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps([asdict(trial) for trial in trials]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
