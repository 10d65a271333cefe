"""`terrazzo train` as the launcher: refuses what cannot run, starts the ranks, and ends as they end."""

from __future__ import annotations

import os
from pathlib import Path

from terrazzo.config import Config
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.machine import ranks_to_start, resolve_device
from terrazzo.messages import counted
from terrazzo.telemetry import RunConsole
from terrazzo.telemetry.watchdog.watchdog import Patience
from terrazzo.train.checkpoints.restart_points import restarts_of
from terrazzo.train.preflight import check
from terrazzo.train.report.stop_notices import launcher_notices
from terrazzo.train.settings.run_command import RunCommand
from terrazzo.train.trainer_rank import train_as_rank

__all__ = ["start_training"]

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}
"""The environment of a run's only rank."""


def start_training(config: Config, path: Path, overrides: list[str]) -> int:
    """Run `terrazzo train PATH OVERRIDES`; returns its exit code. A single rank runs in this process.

    Args:
        config: what `path` and `overrides` say.

    Raises:
        BadInput: the configuration cannot work. No process has been started.
    """
    command = RunCommand(path, overrides)
    ranks = ranks_to_start(config)
    check(config, ranks, fewer=[number for number in config.rank_numbers if number < ranks])
    device = resolve_device(config.launch)
    why = " (torch sees no CUDA device)" if (config.launch.device, device) == ("auto", "cpu") else ""
    RunConsole().say(f"starting {counted(ranks, f'{device.upper()} rank')}{why} ...")
    if ranks == 1 and not config.launch.restarts:
        os.environ.update(ALONE)
        return train_as_rank(path, overrides, command)
    words = ["-m", "terrazzo", "train", str(path), *overrides]
    notices = launcher_notices(config, command)
    patience = Patience(config.launch.stall_s, config.launch.timeout_s)
    restarts = restarts_of(config, words) if config.launch.restarts else None
    return launch_ranks(LaunchSpec(ranks, words), notices=notices, patience=patience, restarts=restarts)
