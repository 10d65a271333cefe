"""`terrazzo train CONFIG [section.key=value ...]`: this process is the launcher, or a rank that others started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.cli.shared.interrupted import ending_interrupted
from terrazzo.errors import BadInput
from terrazzo.messages import printable
from terrazzo.shell_command import terrazzo_command

__all__ = ["train"]


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML, JSON or TOML file; examples/quickstart.yaml is one.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...",
            help="Settings that replace the file's, without dashes, such as train.steps=100 plan=zero1.",
        ),
    ] = None,
) -> None:
    """Train a model on one machine, under torchrun, or under Slurm: same file, same command.

    Starts `launch.ranks` processes on this machine unless torchrun or srun has already started them. Asked to stop
    (SIGTERM, Ctrl-C, a closed terminal) it saves a checkpoint, from which the same command continues. After a failure
    that may pass, launch.restarts=N starts all ranks again from the newest checkpoint, N times at most. When nobody
    reads its lines any more (`| head`), it goes on, and log.folder has them.
    """
    from terrazzo.config import load_config
    from terrazzo.launch.environment import adopt_slurm, is_rank, library_settings
    from terrazzo.launch.stopping.notices import ENDED_BEFORE_TRAINING

    if config.suffix == ".py":
        raise BadInput(f"'{config}' is a script, and no configuration: write {terrazzo_command()} run {config}.")
    adopt_slurm()
    os.environ.update(library_settings() | os.environ)  # whoever starts ranks, and before torch is imported
    if is_rank():  # which says together with the others what is wrong
        from terrazzo.train.trainer_rank import train_as_rank

        train_as_rank(config, overrides or [])  # ends the process
    with ending_interrupted(ENDED_BEFORE_TRAINING):
        settings = load_config(config, overrides or [])  # before seconds of imports
        if sys.stdout.isatty():
            print(f"checking {printable(str(config))} ...", flush=True)
        from terrazzo.train.start_trainer import start_training

        raise typer.Exit(start_training(settings, config, overrides or []))
