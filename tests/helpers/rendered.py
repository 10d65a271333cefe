"""The process that renders chat templates as a fork of the server, which has imported transformers: a second less each.

What a process takes over from its parent, such as signals that it ignores, this one does not: tests of that have
`rendering` start it itself.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from tests.helpers.forkserver import spawning_by_fork

__all__ = ["BY_FORK", "by_forks"]


class _Renderer:
    """What `rendering` needs of a `subprocess.Popen` of itself."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any
    ) -> None:
        theirs = Connection(os.dup(pass_fds[0]))
        self._ended = threading.Lock()  # one thread at a time may ask how it has ended
        self._process = mp.get_context("spawn").Process(target=_render, args=(theirs, dict(env)), daemon=True)
        with spawning_by_fork():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        with self._ended:
            return self._process.exitcode

    def wait(self) -> int | None:
        with self._ended:
            self._process.join()
            return self._process.exitcode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)  # type: ignore[arg-type]


def _render(line: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    from terrazzo.train.data import rendering  # not with this module: pools that render nothing have it, too

    sys.argv = [str(rendering.__file__), str(line.fileno())]
    rendering.main()


BY_FORK = SimpleNamespace(Popen=_Renderer, DEVNULL=subprocess.DEVNULL)
"""In the place of `subprocess` there."""


def by_forks() -> None:
    """In this process, from now on, where it has imported what renders."""
    if (rendering := sys.modules.get("terrazzo.train.data.rendering")) is not None:
        rendering.subprocess = BY_FORK  # type: ignore[attr-defined]
