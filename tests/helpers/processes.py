"""Real gloo processes for the tests that threads cannot stand in for: order, crashes, files, launch.

`Pool` keeps its processes for many functions; `run_in_processes` starts fresh ones for a function that may break them.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.helpers.forkserver import spawning_by_fork
from tests.helpers.rendered import by_forks
from tests.helpers.untraced import leave_out_traces

Report = tuple[bool, Any, float]  # succeeded, result or traceback text, time it ended at


_running: weakref.WeakSet[Pool] = weakref.WeakSet()


class RankFailed(RuntimeError):
    """A rank raised, died or ran out of time; the message holds the traceback that came first, and what ranks said."""


class Pool:
    """`world_size` gloo processes with one thread each, joined in one default group until the pool closes.

    Functions must be importable (module level), and they and their results picklable. A failure closes the
    pool, because ranks that lost a peer cannot be trusted; the next `run` starts a new set. What a function prints, on
    either stream, is shown where it fails.
    """

    starting = staticmethod(spawning_by_fork)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0, grace_s: float = 2.0
    ) -> list[Any]:
        """`function(*arguments)` on every rank; the results in rank order. Raises `RankFailed`.

        Args:
            grace_s: what other ranks have after a first failure, before they are killed.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            reports = self._collect(time.monotonic() + timeout_s, grace_s)
        except BaseException:  # a test's time limit: a late answer would be taken for that of the next function
            self.close(kill=True)
            raise
        failures = sorted((at, rank, text) for rank, (ok, text, at) in reports.items() if not ok)
        missing = [rank for rank in range(self.world_size) if rank not in reports]
        if failures or missing:
            said = self._said()
            self.close(kill=True)
            if failures:
                raise RankFailed(f"rank {failures[0][1]} failed first:\n{failures[0][2]}{said}")
            raise RankFailed(f"ranks {missing} gave no answer within {timeout_s:.0f} s and were killed{said}")
        return [reports[rank][1] for rank in range(self.world_size)]

    def _said(self) -> str:
        """What ranks have printed in the last function."""
        assert self._folder is not None
        said = ((rank, _output(self._folder.name, rank)) for rank in range(self.world_size))
        texts = ((rank, path.read_text(errors="replace")) for rank, path in said if path.exists())
        return "".join(f"\nrank {rank} said:\n{text}" for rank, text in texts if text)

    def close(self, kill: bool = False) -> None:
        """End the processes: politely after a success, by force after a failure. The next `run` starts others."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        _running.discard(self)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def body(self) -> Callable[..., None]:
        """What each process runs."""
        return serve

    def _start(self) -> None:
        context = mp.get_context("spawn")
        _running.add(self)
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-test-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self._folder.name, theirs)
            process = context.Process(target=self.body, args=arguments, daemon=True)
            with self.starting():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, grace_s: float) -> dict[int, Report]:
        """One report per rank; after a first failure the others get so much longer for their own."""
        reports: dict[int, Report] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left_s):
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    reports[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    reports[rank] = (False, f"the process ended with exit code {code}", time.time())
                if not reports[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return reports


def close_pools() -> None:
    """End the processes of all pools of this one.

    A thread of gloo's for each group that there has been looks up a hundred times a second, also where nothing is run.
    """
    for pool in list(_running):
        pool.close()


def run_in_processes(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 150.0, grace_s: float = 2.0
) -> list[Any]:
    """`function(*arguments)` on `world_size` fresh gloo processes; the results in rank order."""
    with Pool(world_size) as pool:
        return pool.run(function, *arguments, timeout_s=timeout_s, grace_s=grace_s)


def serve(rank: int, world_size: int, folder: str, pipe: Connection, backend: str = "gloo") -> None:
    """Body of one process: join the group, then run functions until the pipe closes."""
    gc.freeze()  # what the server has imported
    output = _output(folder, rank)
    with output.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    leave_out_traces()
    mp.current_process().daemon = False  # it may start others, which end with it
    by_forks()
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    modules = 0
    while True:
        if len(sys.modules) != modules:  # what a function has imported stays
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        try:
            function, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            break
        except Exception:  # the function could not be imported here
            pipe.send((False, traceback.format_exc(), time.time()))
            continue
        os.truncate(output, 0)
        report = _attempt(function, arguments)
        sys.stdout.flush()
        pipe.send(report)
    dist.destroy_process_group()


def _output(folder: str, rank: int) -> Path:
    """The file of what a rank prints."""
    return Path(folder, f"output-{rank}")


def _attempt(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Report:
    torch.manual_seed(0)
    try:
        return True, function(*arguments), time.time()
    except BaseException:
        return False, traceback.format_exc(), time.time()
