"""`terrazzo train` from its arguments to its exit code: refuse, launch or join, train."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from terrazzo.config import LaunchConfig, load_config
from terrazzo.errors import BadInput, TerrazzoError
from terrazzo.exchange import together
from terrazzo.telemetry import Console
from terrazzo.train.command import Command
from terrazzo.train.launch.failure import announce_ready, run_rank
from terrazzo.train.launch.here import resolve_device
from terrazzo.train.launch.ranks import agree_on_config, join
from terrazzo.train.launch.starting import adopt_slurm, is_rank, launch_ranks, ranks_to_start
from terrazzo.train.launch.stop import StopRequest
from terrazzo.train.launch.telling import REPORT
from terrazzo.train.loop import Trainer
from terrazzo.train.preflight import check
from terrazzo.train.session import open_session

__all__ = ["train_command"]

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def train_command(path: Path, overrides: list[str]) -> int:
    """The exit code of `terrazzo train PATH OVERRIDES`. Where this process is itself a rank, it does not return.

    Raises:
        BadInput: found before any process was started.
    """
    adopt_slurm()
    command = Command(path, overrides) if REPORT in os.environ or not is_rank() else Command()
    if not is_rank():
        config = load_config(path, overrides)
        ranks = ranks_to_start(config.launch)
        check(config, ranks)
        Console().say(f"starting {ranks} {resolve_device(config.launch).upper()} rank{'s' if ranks > 1 else ''} ...")
        if ranks > 1:
            return launch_ranks(ranks, ["-m", "terrazzo", "train", str(path), *overrides])
        os.environ.update(ALONE, MASTER_ADDR="localhost", MASTER_PORT="0")
    return run_rank(int(os.environ["RANK"]), lambda: _train_rank(path, overrides, command))


def _train_rank(path: Path, overrides: list[str], command: Command) -> int:
    """One rank's whole life; its exit code. What is wrong on one is raised on all: each reads its own file."""
    stop = StopRequest()
    announce_ready()
    ranks = join(_launch_of(path, overrides))
    config = together(lambda: load_config(path, overrides), TerrazzoError)
    agree_on_config(config)
    notes = together(lambda: check(config, ranks.world_size), TerrazzoError)
    with open_session(config, ranks, notes) as session:
        code = Trainer(session, stop, command).run()
    dist.destroy_process_group()
    return code


def _launch_of(path: Path, overrides: list[str]) -> LaunchConfig:
    """What to join with; where this rank cannot read it, all hear of it once they have met."""
    try:
        return load_config(path, overrides).launch
    except BadInput:
        return LaunchConfig()
