"""xdist's workers as forks of the server of `forkserver`: each begins with what takes ten seconds to import.

The server forks what the tests start, too: there is one, rather than one to each worker.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from tests.helpers.forkserver import spawning_by_fork

__all__ = ["are_asked_for", "fork", "report_less"]


class _Worker:
    """What execnet needs of a `subprocess.Popen` of `[python, ..., "-c", code]` with pipes to standard streams."""

    def __init__(self, command: list[str]) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        streams = Connection(theirs_in, writable=False), Connection(theirs_out, readable=False)
        self._process = mp.get_context("spawn").Process(target=_main, args=(command[-1], *streams), daemon=True)
        with spawning_by_fork():
            self._process.start()
        for stream in streams:
            stream.close()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _main(code: str, *streams: Connection) -> None:
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    mp.current_process().daemon = False  # it starts others
    mp.set_start_method(None, force=True)  # the default
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(code, vars(module))


class _Io(gateway_io.Popen2IOMaster):
    def __init__(self, command: list[str], execmodel: ExecModel) -> None:
        self.popen = _Worker(command)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


def are_asked_for(config: pytest.Config) -> bool:
    """Whether others than this process run the tests."""
    return config.getoption("dist", "no") != "no" and bool(config.getoption("tx"))


def fork() -> None:
    """Have xdist start workers so, from now on."""
    gateway_io.Popen2IOMaster = _Io  # type: ignore[misc]


def report_less(config: pytest.Config) -> None:
    """From a worker: of a test that goes well its call alone, where nobody asks for what is before and behind.

    The process that hands tests out looks at each report, and at that each test begins and ends.
    """
    if config.getoption("xmlpath", None) or config.getoption("durations", None) is not None:
        return
    hook = config.hook
    for told in hook.pytest_runtest_logreport.get_hookimpls():
        if type(told.plugin).__name__ == "WorkerInteractor":  # of a module that xdist runs under another name
            told.function = functools.partial(_tell_what_counts, told.function)
            if config.getoption("verbose") < 1:  # what would be printed of it
                hook.pytest_runtest_logstart._remove_plugin(told.plugin)
                hook.pytest_runtest_logfinish._remove_plugin(told.plugin)


def _tell_what_counts(tell: Callable[[pytest.TestReport], None], report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed or report.sections:
        tell(report)
