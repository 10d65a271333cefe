"""Whether this process was started as a rank, and as which one, according to its environment.

Nothing here imports torch, so that a configuration can be refused, and what torch and its libraries read of the
environment be set, before torch is imported.
"""

from __future__ import annotations

import os
import re

from terrazzo.errors import BadInput
from terrazzo.processes.cpus import allowed_cpus

__all__ = [
    "RUN_ID",
    "adopt_slurm",
    "first_host",
    "is_rank",
    "library_settings",
    "local_rank",
    "require_environment",
    "starter",
    "told_threads",
]

RUN_ID = "terrazzo"
"""torchrun's id of a run, by which ranks of Terrazzo's launcher are told from torchrun's."""

_NEEDED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_environment() -> None:
    """Raise `BadInput` if variables are missing, with which each rank would take the first GPU and all CPUs, or if some
    are no numbers.
    """
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise BadInput(
            f"RANK and WORLD_SIZE are set, and {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not. Start"
            " ranks with torchrun or srun, which tell each where it is; or set LOCAL_RANK, which counts the ranks of a"
            " machine from 0, LOCAL_WORLD_SIZE, which is how many these are, and MASTER_ADDR and MASTER_PORT, where"
            " rank 0 can be reached."
        )
    for name, least in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        if not (os.environ[name].isdecimal() and int(os.environ[name]) >= least):
            raise BadInput(f"{name} is '{os.environ[name]}', expected a whole number from {least} on: set it to one.")
    if (rank := int(os.environ["RANK"])) >= (world_size := int(os.environ["WORLD_SIZE"])):
        raise BadInput(f"RANK is {rank} and WORLD_SIZE is {world_size}: ranks count from 0 to {world_size - 1}.")


def starter() -> str:
    """Who has started this rank, judged by the environment."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return "`terrazzo run`" if run == RUN_ID else "torchrun"
    return "Slurm" if "SLURM_PROCID" in os.environ else "whoever set RANK"


def library_settings() -> dict[str, str]:
    """Default environment variables of processes that train, which the user's own override.

    PYTORCH_ALLOC_CONF: gathered weights of units of several sizes come and go; segments that grow leave no gaps between
    them (PyTorch, "Memory management" in the notes on CUDA). Without a GPU nothing reads it.

    GOMP_SPINCOUNT: if all cores are busy already, threads of a kernel that wait for each other should sleep soon. By
    default they spin for 300,000 turns (libgomp) on cores that other threads need.
    """
    chosen = {}
    if os.getloadavg()[0] >= len(allowed_cpus()) and "OMP_WAIT_POLICY" not in os.environ:
        chosen["GOMP_SPINCOUNT"] = "1000"
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        chosen["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return chosen


def told_threads() -> int | None:
    """The threads of `OMP_NUM_THREADS`; None where it is not set, or torchrun's 1 for any of several ranks."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not value.isdecimal() or int(value) == 0 or (value == "1" and _started_by_torchrun()):
        return None
    return int(value)


def _started_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_RUN_ID", RUN_ID) != RUN_ID


def local_rank() -> int:
    """The number of this rank among those of its machine."""
    return int(os.environ["LOCAL_RANK"])


def is_rank() -> bool:
    """Whether this process was started as one rank of a run by torchrun, Slurm or Terrazzo's launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def adopt_slurm() -> None:
    """Inside one of several `srun` tasks, set the variables that torchrun would have set. Elsewhere nothing happens.

    A lone task is no rank, as a shell may be one: the ranks of its machine are still to be started.

    Raises:
        BadInput: Slurm does not say how many of the tasks run on each node, or on which one this is.
    """
    env = os.environ
    if is_rank() or "SLURM_PROCID" not in env or not ({"SLURM_STEP_ID", "SLURM_STEPID"} & set(env)):
        return
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "0")
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return
    told = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not told:
        raise BadInput(
            f"This is one of {tasks} tasks of Slurm, and neither SLURM_STEP_TASKS_PER_NODE nor SLURM_TASKS_PER_NODE "
            "says how many of them are on each node: start them with srun, which sets both, or set the second one, to "
            "4(x2) for four on each of two nodes."
        )
    env["LOCAL_WORLD_SIZE"] = str(_tasks_here(told, env.get("SLURM_NODEID", "")))
    env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"] = env["SLURM_PROCID"], tasks, env.get("SLURM_LOCALID", "0")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
    env.setdefault("MASTER_ADDR", first_host(nodes))
    env.setdefault("MASTER_PORT", str(_port(env.get("SLURM_JOB_ID", "0"), step)))


def _port(job: str, step: str) -> int:
    """A port for each step of a job, below those that Linux assigns by itself (from 32768)."""
    return 10_000 + (7 * int(job) + int(step)) % 20_000


def _tasks_here(told: str, node: str) -> int:
    """How many of the tasks are on this node."""
    per_node = _tasks_per_node(told)
    if len(set(per_node)) == 1:
        return per_node[0]
    if not (node.isdecimal() and int(node) < len(per_node)):
        raise BadInput(
            f"Slurm has '{told}' tasks on its nodes, and SLURM_NODEID, which says which of them this is, is"
            f" '{node}': start the tasks with srun, which sets both."
        )
    return per_node[int(node)]


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, node by node: `4(x2),1` → `[4, 4, 1]`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list, where rank 0 runs: `gpu[003-007,9],login` → `gpu003`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
