"""A process for each contender, so that its memory and its allocator are its own; it lives on between its turns."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

START_LIMIT_S = 900.0  # compiling included
CALL_LIMIT_S = 600.0
END_LIMIT_S = 20.0


class Failed(RuntimeError):
    """The process raised, died or did not answer; the message says which in one line."""


class Seat:
    """A process that holds `make(*arguments)`; its methods are called from here. Raises: `Failed`."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-gpu-")
        self._log = Path(self._folder.name) / "log"
        self._pipe, theirs = spawn.Pipe()
        # Not a daemon: those may not start processes, as the compiler does.
        self._process = spawn.Process(target=_serve, args=(theirs, str(self._log), make, arguments))
        self._process.start()
        theirs.close()
        try:
            self._answer(START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def call(self, method: str) -> Any:
        """What the method returns."""
        with contextlib.suppress(ConnectionError):  # it has died: the answer says how
            self._pipe.send(method)
        return self._answer(CALL_LIMIT_S)

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._pipe.close()
        self._process.join(END_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._pipe.poll(limit_s):
                self._process.kill()
                raise Failed(f"no answer within {limit_s:.0f} s")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_LIMIT_S)
            raise Failed(f"exit code {self._process.exitcode}: {_last_line(self._log.read_text())}") from None
        if not good:
            raise Failed(value)
        return value


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _serve(pipe: Connection, log: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Body of the process: everything that it prints goes to `log`."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        made = make(*arguments)
        pipe.send((True, None))
        while True:
            pipe.send((True, getattr(made, pipe.recv())()))
    except (EOFError, BrokenPipeError):  # the other end was closed: this is how it ends
        pass
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"))
    if dist.is_initialized():
        dist.destroy_process_group()
