"""`terrazzo train` from its arguments to its exit code: refuse, launch or join, train."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from terrazzo.config import Config, LaunchConfig, load_config
from terrazzo.errors import BadInput
from terrazzo.train.failure import run_rank
from terrazzo.train.launch import adopt_slurm, is_rank, launch_ranks, local_ranks, register_rank
from terrazzo.train.loop import Trainer
from terrazzo.train.preflight import check
from terrazzo.train.ranks import agree_on_config, join, refuse_together
from terrazzo.train.session import open_session
from terrazzo.train.stop import StopRequest

__all__ = ["train_command"]

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
    return run_rank(int(os.environ["RANK"]), lambda: train_rank(path, overrides))


def train_rank(path: Path, overrides: list[str]) -> int:
    """One rank's whole life; its exit code."""
    stop = StopRequest()
    register_rank()
    config, problem = _try_load(path, overrides)
    ranks = join(LaunchConfig() if config is None else config.launch)
    refuse_together(problem)
    assert config is not None
    agree_on_config(config)
    notes, problem = _try_check(config, ranks.world_size)
    refuse_together(problem)
    session = open_session(config, ranks)
    session.plan_notes = notes
    try:
        code = Trainer(session, stop).run()
    except BaseException:
        session.keeper.leave()
        raise
    finally:
        session.close()
    dist.destroy_process_group()
    return code


def _try_load(path: Path, overrides: list[str]) -> tuple[Config | None, str | None]:
    """The configuration, or what is wrong with it: other ranks may have read another file."""
    try:
        return load_config(path, overrides), None
    except BadInput as error:
        return None, str(error)


def _try_check(config: Config, world_size: int) -> tuple[list[str], str | None]:
    """What the planner has to say, or what is wrong."""
    try:
        return check(config, world_size), None
    except BadInput as error:
        return [], str(error)
