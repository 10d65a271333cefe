"""One rank of a script, in a process forked from one that has imported what scripts import.

Whatever a script prints, its losses are what it calls `backward` of: these are written down, with how it ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Ended", "run"]


@dataclass(frozen=True)
class Ended:
    """How one rank of a script ended.

    Attributes:
        losses: of each `backward`, in order.
        error: its class and message; None if the script came to its end, "killed" if it ran for too long.
    """

    losses: list[float]
    error: str | None


def run(command: list[str], ranks: int, folder: Path, environment: Mapping[str, str], limit_s: float) -> list[Ended]:
    """Run `command`, a script or `-m` and a module and their arguments, in `folder`; what each rank prints is there.

    Args:
        environment: beside torchrun's variables, which are set.
        limit_s: after which ranks are killed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has one for its ranks
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **environment}
    started = [
        _forked(lambda rank=rank: _rank(command, folder, rank, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))  # type: ignore[misc]
        for rank in range(ranks)
    ]
    codes = _wait(started, limit_s)
    return [_ended(folder / f"rank{rank}.json", code) for rank, code in enumerate(codes)]


def _forked(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # it is killed with what it has started
        work()
    finally:
        os._exit(0)
    raise AssertionError


def _wait(pids: list[int], limit_s: float) -> list[int]:
    """Until all have ended, with each one's exit code. Who waits for one that is gone, or too long, is killed."""
    deadline, codes = time.monotonic() + limit_s, dict[int, int]()
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
                deadline = min(deadline, time.monotonic() + 60.0)  # ranks end together
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                codes[pid] = _kill(pid)
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def _kill(pid: int) -> int:
    """Have a rank print where it is, which ends it, and end all that it has started; returns its exit code."""
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 10.0  # a busy machine takes its time
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(pid, 0))[1])


def _ended(path: Path, code: int) -> Ended:
    if path.exists():
        return Ended(**json.loads(path.read_text(encoding="utf-8")))
    killed = code in (-signal.SIGKILL, -signal.SIGUSR1)
    return Ended([], "killed" if killed else f"gone, with exit code {code}")


def _rank(command: list[str], folder: Path, rank: int, environment: dict[str, str]) -> None:
    printed = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    faulthandler.register(signal.SIGUSR1, file=2, chain=True)
    os.environ.update(environment)
    os.chdir(folder)
    losses = _noted()
    _keep_groups()
    error = None
    try:
        _execute(command)
    except SystemExit as end:
        error = f"SystemExit: {end.code}" if end.code else None
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    sys.stdout.flush()
    sys.stderr.flush()
    told = folder / f"rank{rank}.json"
    told.with_suffix(".part").write_text(json.dumps({"losses": losses, "error": error}), encoding="utf-8")
    told.with_suffix(".part").rename(told)


def _noted() -> list[float]:
    """A list that gets the value of each tensor whose `backward` is called."""
    losses: list[float] = []
    kind: Any = torch.Tensor
    inner = kind.backward

    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.numel() == 1:
            losses.append(tensor.item())
        inner(tensor, *args, **kwargs)

    kind.backward = backward
    return losses


def _keep_groups() -> None:
    """Hold the process groups that a script is done with, so that no destructor of theirs runs.

    That of torch 2.13's gloo holds the GIL and waits for a thread, which may be waiting for the GIL: a rank of DDP now
    and then does not end.
    """
    kept: list[Any] = []
    inner = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        kept.extend(dist.distributed_c10d._world.pg_map)
        inner(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group


def _execute(command: list[str]) -> None:
    """As the interpreter does with what stands behind `python`."""
    sys.path.append(os.getcwd())  # where stand-ins are
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = list(command), [str(Path(command[0]).parent)]
        runpy.run_path(command[0], run_name="__main__")
