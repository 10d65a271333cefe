"""Starting ranks: join what torchrun or Slurm has started, else start `launch.ranks` processes on this machine.

Local ranks are run by torch's elastic agent, each as `python -m terrazzo train ...` with the environment that torchrun
would have given it, so there is one way in which a rank begins. Nothing is restarted.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig as AgentConfig
from torch.distributed.launcher.api import elastic_launch

from terrazzo.errors import BadInput
from terrazzo.train.config import LaunchConfig
from terrazzo.train.failure import BAD_INPUT, FAILED, SHARED_FOLDER, first_failure

__all__ = [
    "adopt_slurm",
    "first_host",
    "is_rank",
    "launch_ranks",
    "local_ranks",
    "register_rank",
    "resolve_device",
    "set_threads",
]


def is_rank() -> bool:
    """Whether this process was started as one rank of a run by torchrun, Slurm or this module."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def resolve_device(config: LaunchConfig) -> str:
    """`cpu` or `cuda`; raises `BadInput` when CUDA is asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            "launch.device is 'cuda', but torch sees no CUDA device: use launch.device=cpu, or install a torch build"
            " with CUDA and check that `nvidia-smi` lists a GPU."
        )
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def local_ranks(config: LaunchConfig) -> int:
    """How many ranks this command starts; raises `BadInput` for more CUDA ranks than devices."""
    device = resolve_device(config)
    devices = torch.cuda.device_count() if device == "cuda" else 1
    if device == "cuda" and config.ranks is not None and config.ranks > devices:
        raise BadInput(
            f"launch.ranks is {config.ranks}, but this machine has {devices} CUDA devices and each rank needs its"
            f" own: use launch.ranks={devices}, or launch.device=cpu."
        )
    return config.ranks or devices


def set_threads(config: LaunchConfig, ranks_here: int) -> None:
    """Give this rank its share of the machine's cores."""
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // ranks_here))


def adopt_slurm() -> None:
    """Inside an `srun` task, set the variables that torchrun would have set. Elsewhere nothing happens."""
    env = os.environ
    if is_rank() or "SLURM_PROCID" not in env or not ({"SLURM_STEP_ID", "SLURM_STEPID"} & set(env)):
        return
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = (
        env["SLURM_PROCID"],
        tasks,
        env.get("SLURM_LOCALID", "0"),
    )
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", tasks)  # such as "4(x2)" or "4,2"
    env["LOCAL_WORLD_SIZE"] = re.split(r"[(,]", per_node)[0]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
    env.setdefault("MASTER_ADDR", first_host(nodes))
    env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000))


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list, where rank 0 runs: `gpu[003-007,9],login` → `gpu003`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def launch_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS` as `ranks` local ranks; returns the exit code for this process.

    Prints the first failing rank's message or traceback as the last thing on screen.
    """
    folder = Path(tempfile.mkdtemp(prefix="terrazzo-"))
    os.environ[SHARED_FOLDER] = str(folder)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # our own report says it in one place
    agent = AgentConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and SIGINT are forwarded, see _Forward
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _Forward(folder))
    try:
        elastic_launch(agent, sys.executable)(*arguments)
    except ChildFailedError as error:
        return _report(folder, error)
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


class _Forward:
    """Signal handler: the first signal goes to every rank as SIGTERM, a second one ends everything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        pids = [int(path.suffix[1:]) for path in self._folder.glob("pid.*")]
        if not pids:  # the ranks have not begun: let the agent end them
            raise SignalException("stopped while starting", signal.Signals(number))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM if self._count == 1 else signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self._count > 1:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(128 + number)


def register_rank() -> None:
    """Tell the process that started this rank where to send signals."""
    if folder := os.environ.get(SHARED_FOLDER):
        (Path(folder) / f"pid.{os.getpid()}").touch()


def _report(folder: Path, error: ChildFailedError) -> int:
    """Say what ended the run; its exit code."""
    failures: list[ProcessFailure] = list(error.failures.values())
    first = first_failure(folder)
    killed = next((failure for failure in failures if failure.exitcode < 0), None)
    stopped_by_agent = first is not None and killed is not None and -killed.exitcode == signal.SIGTERM
    if killed is not None and not stopped_by_agent:  # died without a word: the errors of the others follow from it
        name = signal.Signals(-killed.exitcode).name
        hint = " (often the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
        print(
            f"Rank {killed.local_rank} was ended by {name}{hint}; the other ranks were stopped.",
            file=sys.stderr,
        )
        return FAILED
    if first is None:
        return max(failure.exitcode for failure in failures)
    if first.exit_code == BAD_INPUT:
        print(first.text, file=sys.stderr)
    else:
        print(f"Rank {first.rank} failed first:\n{first.text}", file=sys.stderr)
    return first.exit_code
