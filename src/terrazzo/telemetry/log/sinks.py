"""Where metrics go: `metrics.jsonl`, and TensorBoard event files. Only rank 0 has any."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from terrazzo.files import replacing
from terrazzo.processes.standard_streams import say_on_stderr

__all__ = ["ENDS_OF_RUNS", "JsonLines", "Sink", "TensorBoard"]

ENDS_OF_RUNS = ("summary", "end")
"""Kinds of lines that end a run: of `terrazzo train`, and of a loop of the user's."""


class Sink(ABC):
    """Writes named numbers of steps. A full disk does not end the run: the sink says so once on stderr."""

    path: Path
    failed = False
    """Whether something was not written."""

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write `values` of `step`; `kind` is that of a line in `metrics.jsonl`: `train`, `step`, `summary`, ..."""
        with self._unfailing():
            self._log(kind, step, values)

    def close(self) -> None:
        """Flush and close."""
        with self._unfailing():
            self._close()

    @abstractmethod
    def _log(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @contextlib.contextmanager
    def _unfailing(self) -> Iterator[None]:
        with saying_unwritable(self.path, again=not self.failed) as seen:
            yield
        self.failed = self.failed or bool(seen)


@contextlib.contextmanager
def saying_unwritable(path: Path, *, again: bool = True) -> Iterator[list[OSError]]:
    """Within this context an `OSError` is said on stderr and ends no run; `again=False` says it no more.

    Returns:
        a list that has the error afterwards.
    """
    seen: list[OSError] = []
    try:
        yield seen
    except OSError as error:
        seen.append(error)
        if again:
            why = error.strerror or error
            say_on_stderr(f"'{path}' cannot be written ({why}): the run goes on, and what it measures may be missing.")


class JsonLines(Sink):
    """One JSON object per line. When a run resumes, lines of steps that it will do again are dropped.

    Whenever a run is killed, the file has the lines up to the step that it can resume from: lines are only appended,
    and dropping some replaces the file by another one that is already complete on the disk.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Open `path` to append lines after step `first_step`; 0 starts the file anew."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with self._unfailing():  # a full disk: lines of steps that come again stay, the newest count
                _cut_back(path, first_step)
        self._file = path.open("ab", buffering=0)

    def _log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one line, unbuffered, so that a killed run keeps it; whole, or not at all."""
        line = (json.dumps({"kind": kind, "step": step, **values}) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def in_place(self) -> bool:
        """Whether the file at `path` is still the open one: neither it nor a folder above was moved."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def _close(self) -> None:
        self._file.close()


def _cut_back(path: Path, last_step: int) -> None:
    """Keep the lines up to `last_step` of an earlier start, without its verdict and its end."""
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if last_step and _stays(line, last_step)]
    if earlier == lines:
        return
    with replacing(path, sync=True) as beside:
        beside.write_bytes(b"".join(earlier))


def _stays(line: bytes, last_step: int) -> bool:
    """Whether a line is kept; one that is cut short or damaged is not."""
    try:
        values = json.loads(line)
        return line.endswith(b"\n") and values["step"] <= last_step and values["kind"] not in ("verdict", *ENDS_OF_RUNS)
    except (ValueError, TypeError, KeyError):
        return False


class TensorBoard(Sink):
    """TensorBoard event files, with every number as `kind/name`. Lists (by rank or expert) are not written."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """A new run (`first_step` 0) removes old event files; a resumed one hides steps after `first_step` in them."""
        self.path = folder
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        for old in folder.glob("events.out.tfevents.*") if not first_step else ():
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def _log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers as scalars and strings as text; those of a nested dict as `kind/name/key`."""
        for name, value in values.items():
            if isinstance(value, dict):
                self._log(f"{kind}/{name}", step, value)
            elif isinstance(value, str):
                self._writer.add_text(f"{kind}/{name}", value, step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def _close(self) -> None:
        self._writer.close()
