"""`terrazzo run`: starts a user's training script on ranks of this machine, in place of torchrun.

Ranks have the environment that torchrun would give them. Where torchrun or Slurm has started this process already, it
is one of their ranks and becomes the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from terrazzo.config import Config
from terrazzo.errors import BadInput
from terrazzo.launch.environment import adopt_slurm, is_rank, require_environment, starter
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.machine import ranks_to_start
from terrazzo.launch.stopping.notices import ENDED_BEFORE_SCRIPT, Notices
from terrazzo.messages import counted
from terrazzo.processes.tether import interpreter_flags
from terrazzo.shell_command import terrazzo_command

__all__ = ["Script", "run_script"]

_RANK = "terrazzo.launch.script.script_rank"


class Script(NamedTuple):
    """A file, or a module by its name, and its arguments."""

    target: str
    arguments: Sequence[str]
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """The words after `python` that run it."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


def run_script(script: Script, ranks: int | None) -> int:
    """Start `ranks` local ranks, by default one per GPU, or one on a CPU; returns the exit code.

    If another program has started this process as a rank, it becomes the script and does not return.

    Raises:
        BadInput: the file does not exist, or another number of ranks has been started.
    """
    if not script.is_module and not Path(script.target).exists():
        raise BadInput(
            f"There is no file '{script.target}' to run. A module is named by -m: {terrazzo_command()} run -m MODULE."
        )
    if not script.is_module and Path(script.target).suffix in (".yaml", ".yml", ".json", ".toml"):
        raise BadInput(
            f"'{script.target}' is a configuration, and no script: write {terrazzo_command()} train {script.target}."
        )
    adopt_slurm()
    if is_rank():
        _become(script, ranks)
    count = ranks_to_start(Config()) if ranks is None else ranks
    if ranks is None:
        which = "one for each GPU here" if count > 1 else "as for one GPU, or none"
        print(f"terrazzo run: {counted(count, 'rank')}, {which}; --ranks N starts N.", file=sys.stderr)
    start = LaunchSpec(count, ["-m", _RANK, *script.words])
    return launch_ranks(start, defaults=environment_of_script, labelled=True, notices=notices_of_script(count))


def notices_of_script(ranks: int) -> Notices:
    """What is said when a script is asked to stop: only the script knows what it does then."""
    who, them = (f"all {ranks} ranks of the script", "them") if ranks > 1 else ("the script", "it")
    stopping = f"Stopping: waiting for {who} to end. Ctrl-C once more ends {them} at once."
    return Notices(lambda trains: stopping, lambda: "Ended at once, as asked.", ENDED_BEFORE_SCRIPT)


def environment_of_script(ranks: int) -> dict[str, str]:
    """The environment variables that torchrun sets by default."""
    threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return threads | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def _become(script: Script, ranks: int | None) -> NoReturn:
    who, started = starter(), os.environ["WORLD_SIZE"]
    if ranks is not None and str(ranks) != started:
        raise BadInput(
            f"--ranks is {ranks}, but {who} has started this process as one of WORLD_SIZE={started} ranks: leave"
            f" --ranks out to run the script on these, or start `terrazzo run` without {who}."
        )
    require_environment()
    if os.environ["RANK"] == "0":
        print(f"terrazzo run: the script joins the {started} ranks that {who} has started.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *interpreter_flags(), *script.words])
