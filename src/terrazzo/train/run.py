"""`terrazzo train` from its arguments to its exit code: refuse, launch or join, train."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from terrazzo.config import LaunchConfig, load_config
from terrazzo.errors import BadInput
from terrazzo.train.launch.failure import register_rank, run_rank
from terrazzo.train.launch.ranks import agree_on_config, join, refuse_together
from terrazzo.train.launch.starting import adopt_slurm, is_rank, launch_ranks, local_ranks
from terrazzo.train.launch.stop import StopRequest
from terrazzo.train.loop import Trainer
from terrazzo.train.preflight import check
from terrazzo.train.session import open_session

__all__ = ["train_command"]

T = TypeVar("T")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def train_command(path: Path, overrides: list[str]) -> int:
    """The exit code of `terrazzo train PATH OVERRIDES`. Where this process is itself a rank, it does not return.

    Raises:
        BadInput: found before any process was started.
    """
    adopt_slurm()
    if not is_rank():
        config = load_config(path, overrides)
        ranks = local_ranks(config.launch)
        check(config, ranks)
        if ranks > 1:
            return launch_ranks(ranks, ["-m", "terrazzo", "train", str(path), *overrides])
        os.environ.update(ALONE, MASTER_ADDR="localhost", MASTER_PORT="0")
    return run_rank(int(os.environ["RANK"]), lambda: _train_rank(path, overrides))


def _train_rank(path: Path, overrides: list[str]) -> int:
    """One rank's whole life; its exit code."""
    stop = StopRequest()
    register_rank()
    config, problem = _tried(lambda: load_config(path, overrides))
    ranks = join(LaunchConfig() if config is None else config.launch)
    refuse_together(problem)
    assert config is not None
    agree_on_config(config)
    notes, problem = _tried(lambda: check(config, ranks.world_size))
    refuse_together(problem)
    assert notes is not None
    with open_session(config, ranks, notes) as session:
        code = Trainer(session, stop).run()
    dist.destroy_process_group()
    return code


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it returns, or what is wrong on this rank: others may have read another file."""
    try:
        return work(), None
    except BadInput as error:
        return None, str(error)
