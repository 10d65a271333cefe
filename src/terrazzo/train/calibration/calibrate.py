"""`terrazzo plan CONFIG --calibrate`: from a few real steps to a record that predictions stand on afterwards."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from terrazzo.config import Config, load_config
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exit_codes import BAD_INPUT
from terrazzo.launch.machine import ranks_to_start
from terrazzo.launch.rank.scratch_folder import ScratchFolder
from terrazzo.planner import Setup, TimeFigures
from terrazzo.planner.timing.calibration import Calibration, Software, figures_of, processor, run_of
from terrazzo.planner.timing.compute import step_flops
from terrazzo.planner.timing.measured import computation_s, fitted_pace
from terrazzo.planner.timing.step import CALIBRATED_BAND, time_of
from terrazzo.processes.tether import tethered
from terrazzo.train.calibration.trial import Trial
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.planning.run_estimate import estimate_run
from terrazzo.train.preflight import check
from terrazzo.train.settings.folders import make_swap_folders

__all__ = ["TrialFailed", "calibrate", "record_of"]


class TrialFailed(TerrazzoError):
    """The steps to be measured have failed; the message holds their traceback."""

    says_all = True


def calibrate(path: Path, overrides: Sequence[str] = ()) -> tuple[Calibration, Path]:
    """Run a few steps of a configuration on this machine, in processes of their own, and keep what was measured.

    Returns the record and where it lies.

    Raises:
        BadInput: the configuration cannot run here.
        TrialFailed: its steps failed.
    """
    with ScratchFolder(f"calibrate-{os.getpid()}") as folder:
        out = Path(folder, "trials.json")
        apart = [f"log.folder={folder}/run", f"checkpoint.folder={folder}/checkpoints", "checkpoint.resume=never"]
        changed = [*overrides, *apart, "checkpoint.save_format=terrazzo"]
        make_swap_folders(load_config(path, overrides))  # those inside the log folder that the run itself would have
        config = load_config(path, changed)
        ranks = ranks_to_start(config)
        check(config, ranks)
        _run([str(path), str(out), *changed])
        trials = [Trial(**values) for values in json.loads(out.read_text(encoding="utf-8"))]
    record = record_of(config, ranks, trials)
    return record, record.save()


def _run(arguments: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = tethered("-m", "terrazzo.train.calibration.trial", *arguments)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        kind = BadInput if done.returncode == BAD_INPUT else TrialFailed
        raise kind(f"The steps to be measured could not be made: {done.stderr.strip()}")


def record_of(config: Config, ranks: int, trials: Sequence[Trial]) -> Calibration:
    """What the trials of `config` say. The first is of the configuration as it is."""
    setups = [setup_of(_with_length(config, trial.sequence_length), ranks) for trial in trials]
    first, setup, work = trials[0], setups[0], [step_flops(setup) for setup in setups]
    busy, pace = [trial.step_s - (trial.wait_s or 0.0) for trial in trials], None
    if isinstance(time_of(setup), TimeFigures):  # the device's figures are known
        pace, overhead_s = fitted_pace(setups, busy, waits=first.wait_s is None)
        rate = work[0] / computation_s(setup) / pace
    else:
        rate, overhead_s = _line(work, busy)
    record = Calibration(
        device=setup.cluster.device.name,
        figures=figures_of(setup.cluster.device),
        processor=processor(setup.cluster.device.kind),
        software=Software.here(),
        world_size=ranks,
        matmul=setup.matmul,
        run=run_of(setup),
        pace=pace,
        flops_per_s=rate,
        bandwidth=first.traffic_bytes / first.wait_s if first.wait_s and first.traffic_bytes else None,
        overhead_s=overhead_s,
        memory_offset_bytes=round(first.peak_bytes - estimate_run(config, ranks).memory.near_bytes),
        step_s=first.step_s,
        tokens=setup.tokens * setup.micro_batches,
        flops=work[0],
        traffic_bytes=first.traffic_bytes,
        steps=first.steps,
    )
    return record if _explains(record, setup) else record.model_copy(update={"run": None})


def _explains(record: Calibration, setup: Setup) -> bool:
    """Whether the steps that a record was made of follow from it."""
    time = time_of(setup, calibration=record)
    return isinstance(time, TimeFigures) and abs(time.step_s / record.step_s - 1) <= CALIBRATED_BAND


def _with_length(config: Config, sequence_length: int) -> Config:
    return config.model_copy(update={"batch": config.batch.model_copy(update={"sequence_length": sequence_length})})


def _line(work: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Rate and constant of `seconds = work / rate + constant` through the first and last point.

    Where the points do not tell, because less work took as long or the constant would be negative, it is zero.
    """
    more, less = work[0] - work[-1], seconds[0] - seconds[-1]
    if more > 0 and less > 0:
        constant = seconds[0] - work[0] * less / more
        if constant > 0:
            return more / less, constant
    return work[0] / seconds[0], 0.0
