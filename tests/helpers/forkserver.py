"""Processes that begin with torch imported: forks of one server that has done so, in place of fresh interpreters.

That saves two seconds of computing for each, and six for one that asks for all that the server has (`preload.py`). What
is asked for as "spawn" is given so while `spawning_by_fork` is entered; whoever needs an interpreter of its own uses
`subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any
from unittest import mock

__all__ = ["spawning_by_fork"]

multiprocessing.set_forkserver_preload(["tests.helpers.preload"])


@contextmanager
def spawning_by_fork() -> Iterator[None]:
    with mock.patch.object(SpawnProcess, "_Popen", staticmethod(_start)):
        yield


def _start(process: Any) -> Any:
    process._target = _Here(process._target)
    return ForkServerProcess._Popen(process)


class _Here:
    """A function in the environment of the process that asks for it, and not in that of the server."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.environment, self.folder = function, dict(os.environ), os.getcwd()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # The server that has forked this process runs, and forks for it, too.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        if (tether := sys.modules.get("terrazzo.processes.tether")) is not None:
            tether.PARENT = os.getppid()  # it was imported by the server
        return self.function(*arguments, **keywords)
