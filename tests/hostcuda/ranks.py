"""Ranks with a simulated CUDA device each: forks of a server that has loaded it before torch."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.forkserver
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from unittest import mock

from hostcuda.build import library
from tests.helpers.forkserver import spawning_by_fork
from tests.helpers.processes import Pool, serve

__all__ = ["Ranks"]

_server = multiprocessing.forkserver.ForkServer()
_server.set_forkserver_preload(["tests.hostcuda.preload"])


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    connect = _server.connect_to_new_process
    with spawning_by_fork(), mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", connect):
        yield


class Ranks(Pool):
    """Processes that are joined in one group, by default of gloo on the host and NCCL on the device."""

    starting = staticmethod(_forking)

    def __init__(self, world_size: int, backend: str = "cpu:gloo,cuda:nccl") -> None:
        super().__init__(world_size)
        library()  # built before anybody waits for a rank
        self._backend = backend

    def _start(self) -> None:
        """Waits for the server's imports, which are no part of what is run first."""
        super()._start()
        self.run(abs, 0, timeout_s=300.0)

    @property
    def body(self) -> Callable[..., None]:
        return functools.partial(_serve, self._backend)


def _serve(backend: str, rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    from hostcuda.device import start
    from terrazzo.processes.ending import Thread

    start(home=rank, devices=world_size, frames="/terrazzo/", watched=(Thread,))
    serve(rank, world_size, folder, pipe, backend)
