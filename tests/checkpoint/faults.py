"""Faults on demand: file-system calls that fail, are cut short, or are the last thing that a process does.

`Tap` sees every call that Python code makes on a path below a folder, numbers them, and lets one `Fault` act on them.
What happens inside one call of the C library is not seen; between two calls nothing changes but what one of them did.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch.distributed as dist

import terrazzo.checkpoint.saving.background
import terrazzo.engine.comm.collectives
import terrazzo.engine.model.engine

DENSITY = int(os.environ.get("TERRAZZO_FAULTS", "1"))
"""How many times as many points the fault tests try as in the normal suite; 1000 tries every one."""

PATIENCE_S = 170.0 * DENSITY
"""For all points of a test, on a slow machine."""

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)

_READS = ("preadv", "pread", "read", "fstat", "stat", "lstat", "scandir", "listdir")
_WRITES = (
    "close", "write", "pwrite", "ftruncate", "fsync", "fdatasync", "posix_fallocate", "rename", "replace", "link",
    "symlink", "mkdir", "rmdir", "unlink", "remove", "chmod", "fchmod",
)  # fmt: skip
_OF_OS: list[tuple[ModuleType, str]] = [(os, name) for name in ("open", *_READS, *_WRITES)]
_WATCHED = [*_OF_OS, (fcntl, "flock"), (io, "open")]

Real = Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """One call. `target` is the other path of a rename, `flags` what `os.open` or `io.open` was asked for."""

    number: int
    name: str
    path: str
    target: str = ""
    flags: int | str = 0
    descriptor: int | None = None
    data: Any = None

    @property
    def changes(self) -> bool:
        """Whether the disk may be another after it."""
        if self.name == "open":
            return bool(self.flags & os.O_CREAT) if isinstance(self.flags, int) else "w" in self.flags
        return self.name in (*_WRITES, "flock")


Fault = Callable[[Call, Real], Any]
"""Does the call, or something else; returns or raises what the caller gets."""


def harmless(call: Call, real: Real) -> Any:
    """The call itself."""
    return real()


def killed_after(number: int, signal_number: int = signal.SIGKILL) -> Fault:
    """The process ends right after its call `number`; before any for -1."""

    def fault(call: Call, real: Real) -> Any:
        if number < 0:
            os.kill(os.getpid(), signal_number)
        try:
            return real()
        finally:
            if call.number == number:
                os.kill(os.getpid(), signal_number)

    return fault


def killed_in_write(number: int) -> Fault:
    """The process ends when half of the `number`-th write has been done."""
    writes = itertools.count()

    def fault(call: Call, real: Real) -> Any:
        if call.name == "write" and next(writes) == number:
            assert call.descriptor is not None
            _half(call)
            os.kill(os.getpid(), signal.SIGKILL)
        return real()

    return fault


def fails_at(number: int, code: int, *, for_good: bool = False) -> Fault:
    """Call `number` raises `OSError` of `code`, and `for_good` every one after it. A close that fails has closed."""

    def fault(call: Call, real: Real) -> Any:
        if call.number == number or (for_good and call.number > number):
            if call.name == "close":
                real()
            named = () if call.descriptor is not None else (call.path,)
            raise OSError(code, os.strerror(code), *named)
        return real()

    return fault


def paused_after(numbers: Collection[int], reached: Callable[[], None]) -> Fault:
    """`reached` is called after each call of these `numbers`, before it returns."""

    def fault(call: Call, real: Real) -> Any:
        try:
            return real()
        finally:
            if call.number in numbers:
                reached()

    return fault


def short_writes(largest: int) -> Fault:
    """No write takes more than `largest` bytes."""

    def fault(call: Call, real: Real) -> Any:
        if call.name == "write" and len(call.data) > largest:
            assert call.descriptor is not None
            return _write(call.descriptor, call.data[:largest])
        return real()

    return fault


def corrupted_in_write(number: int) -> Fault:
    """A bit of the `number`-th write arrives as another."""
    writes = itertools.count()

    def fault(call: Call, real: Real) -> Any:
        if call.name == "write" and next(writes) == number:
            assert call.descriptor is not None
            data = bytearray(call.data)
            data[len(data) // 2] ^= 4
            return _write(call.descriptor, data)
        return real()

    return fault


def interrupted_at(number: int) -> Fault:
    """The `number`-th write is interrupted before it has written anything."""
    writes = itertools.count()

    def fault(call: Call, real: Real) -> Any:
        if call.name == "write" and next(writes) == number:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return real()

    return fault


_write = os.write  # the real one, whatever is tapped


def _half(call: Call) -> None:
    assert call.descriptor is not None
    _write(call.descriptor, call.data[: len(call.data) // 2])


class Tap:
    """While it is open, sees the calls on paths below `root` and gives them to `fault`; `calls` lists them."""

    def __init__(self, root: Path, fault: Fault = harmless, *, after: Callable[[Call], None] | None = None) -> None:
        self._root, self._fault, self._after = str(root), fault, after
        self._real: dict[tuple[ModuleType, str], Any] = {}
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()
        self.calls: list[Call] = []

    def __enter__(self) -> Self:
        for module, name in _WATCHED:
            self._real[module, name] = getattr(module, name)
            setattr(module, name, self._wrapped(module, name))
        return self

    def __exit__(self, *error: object) -> None:
        for (module, name), real in self._real.items():
            setattr(module, name, real)

    def _wrapped(self, module: ModuleType, name: str) -> Callable[..., Any]:
        real = self._real[module, name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            path = self._path(arguments, keywords)
            if path is None or not f"{path}/".startswith(f"{self._root}/"):
                return real(*arguments, **keywords)
            return self._seen(name, path, arguments, lambda: real(*arguments, **keywords))

        return call

    def _seen(self, name: str, path: str, arguments: tuple[Any, ...], real: Real) -> Any:
        with self._lock:
            call = _described(len(self.calls), name, path, arguments)
            self.calls.append(call)
        if name == "close":  # before it is closed: another thread may be given its number at once
            self._paths.pop(arguments[0], None)
        result = self._fault(call, real)
        if name == "open" and isinstance(result, int):
            self._paths[result] = path
        if self._after is not None:
            self._after(call)
        return result

    def _path(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
        first = arguments[0] if arguments else keywords.get("path", ".")
        if isinstance(first, int):
            return self._paths.get(first)
        if not isinstance(first, str | bytes | os.PathLike):
            return None
        path = os.fsdecode(first)
        if (folder := keywords.get("dir_fd")) is not None:
            return os.path.join(self._paths.get(folder, ""), path)
        return os.path.abspath(path)


def _described(number: int, name: str, path: str, arguments: tuple[Any, ...]) -> Call:
    descriptor = arguments[0] if isinstance(arguments[0], int) else None
    second: Any = arguments[1] if len(arguments) > 1 else 0
    target = os.fsdecode(second) if name in ("rename", "replace", "link") else ""
    flags = second if isinstance(second, int | str) and name == "open" else 0
    data = memoryview(second).cast("B") if name == "write" else None
    return Call(number, name, path, target, flags, descriptor, data)


def sampled(points: Sequence[int], count: int) -> list[int]:
    """About `count` of `points` times `DENSITY`, evenly spread, the first and the last among them."""
    count = min(len(points), count * DENSITY)
    return [points[round(at * (len(points) - 1) / max(1, count - 1))] for at in range(count)]


@contextmanager
def tapped_for_all(root: Path, fault: Fault) -> Iterator[None]:
    """A tap of all ranks, which are threads. Collective."""
    dist.barrier()
    tap = Tap(root, fault) if dist.get_rank() == 0 else None
    if tap is not None:
        tap.__enter__()
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if tap is not None:
            tap.__exit__()
        dist.barrier()


def calls_of(root: Path, work: Callable[[], object]) -> list[Call]:
    """The calls that `work` makes when nothing goes wrong."""
    with Tap(root) as tap:
        work()
    return tap.calls


def in_child(work: Callable[[], object], timeout_s: float = 30.0) -> int:
    """`work` in a fork of this process; its exit status coded as by `waitpid`: 0, 1 after an error, -9 if killed."""

    return reap(spawn_child(as_the_parent(work)), timeout_s)


def as_the_parent(work: Callable[[], object]) -> Callable[[], object]:
    """`work` of a fork that stands for this process, whose model it uses."""

    def body() -> object:
        for module in (
            terrazzo.checkpoint.saving.background,
            terrazzo.engine.comm.collectives,
            terrazzo.engine.model.engine,
        ):
            module.require_own = lambda *_: None  # type: ignore[attr-defined]
        return work()

    return body


def spawn_child(work: Callable[[], object]) -> int:
    """The process id of a fork of this process that does `work` and ends."""
    with warnings.catch_warnings():  # newer Pythons warn of threads: those of this process only wait meanwhile
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def reap(child: int, timeout_s: float = 30.0) -> int:
    """The exit status of a child; one that takes longer is killed, and an error here."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"the child did not end within {timeout_s:.0f} s")


def hidden(root: Path) -> list[str]:
    """What unfinished saves and removals have left in `root`."""
    return sorted(name for name in os.listdir(root) if name.startswith("."))
