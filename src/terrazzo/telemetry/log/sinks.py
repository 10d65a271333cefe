"""Where metrics go: `metrics.jsonl`, and TensorBoard event files. Only rank 0 has any."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terrazzo.files import replacing

__all__ = ["JsonLines", "Sink", "TensorBoard", "warn_on_stderr"]


class Sink(ABC):
    """Takes named numbers of a step. A run does not end with a full disk: it goes on, and says so once on stderr."""

    path: Path
    _failed = False

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write `values` of `step`; `kind` is a line's in `metrics.jsonl`, such as `train`, `step` or `summary`."""
        with self._unfailing():
            self._log(kind, step, values)

    def close(self) -> None:
        """Flush and release what is open."""
        with self._unfailing():
            self._close()

    @abstractmethod
    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @contextlib.contextmanager
    def _unfailing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                why = error.strerror or error
                warn_on_stderr(
                    f"'{self.path}' cannot be written ({why}): the run goes on, and what it measures may be missing."
                )


def warn_on_stderr(text: str) -> None:
    """Print it, where standard error can still be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


class JsonLines(Sink):
    """One JSON object per line. When a run resumes, lines of steps that are done again are dropped.

    Wherever it is killed, the file holds the lines up to the step that is resumed: it is only ever appended to, and
    what is dropped is dropped by putting another file in its place, whole and on the disk.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Append to `path` from `first_step` on; 0 starts the file anew."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_back(path, first_step)
        self._file = path.open("ab", buffering=0)

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line at once, so that a killed run keeps what it had measured; whole, or not at all."""
        line = (json.dumps({"kind": kind, "step": step, **values}) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def in_place(self) -> bool:
        """Whether the file at `path` is still the one that is written: neither it nor a folder above was moved."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def _close(self) -> None:
        self._file.close()


def _cut_back(path: Path, last_step: int) -> None:
    """Leave the lines up to `last_step` of an earlier run, and none of its summary."""
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if last_step and _stays(line, last_step)]
    if earlier == lines:
        return
    with replacing(path, sync=True) as beside:
        beside.write_bytes(b"".join(earlier))


def _stays(line: bytes, last_step: int) -> bool:
    """A line that was cut short by a kill, or damaged, does not."""
    try:
        values = json.loads(line)
        return line.endswith(b"\n") and values["step"] <= last_step and values["kind"] not in ("summary", "verdict")
    except (ValueError, TypeError, KeyError):
        return False


class TensorBoard(Sink):
    """TensorBoard event files, every number as `kind/name`. Lists, of ranks or experts, are in metrics.jsonl alone."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """A new run (`first_step` 0) starts anew; a resumed one hides the later steps that an earlier one wrote."""
        self.path = folder
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        for old in folder.glob("events.out.tfevents.*") if not first_step else ():
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Numbers as scalars and text as text; those of a dict by both names."""
        for name, value in values.items():
            if isinstance(value, dict):
                self._log(f"{kind}/{name}", step, value)
            elif isinstance(value, str):
                self._writer.add_text(f"{kind}/{name}", value, step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def _close(self) -> None:
        self._writer.close()
