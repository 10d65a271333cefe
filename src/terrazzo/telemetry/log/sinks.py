"""Where metrics go: the console, `metrics.jsonl`, and TensorBoard event files. Only rank 0 has any."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from terrazzo.files import replacing, to_nowhere

__all__ = ["Console", "JsonLines", "Sink", "TensorBoard"]


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
                _warn(f"'{self.path}' cannot be written ({why}): the run goes on, and what it measures may be missing.")


def _warn(text: str) -> None:
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
    kept = [line for line in lines if last_step and _stays(line, last_step)]
    if kept == lines:
        return
    with replacing(path, sync=True) as beside:
        beside.write_bytes(b"".join(kept))


def _stays(line: bytes, last_step: int) -> bool:
    """A line that was cut short by a kill, or damaged, does not."""
    try:
        values = json.loads(line)
        return line.endswith(b"\n") and values["step"] <= last_step and values["kind"] not in ("summary", "verdict")
    except (ValueError, TypeError, KeyError):
        return False


class TensorBoard(Sink):
    """TensorBoard event files, every number as `kind/name`."""

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


class _UnreadConsole(RichConsole):
    """Falls silent when whoever reads standard output has gone, where rich ends the process."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave it as it is: a rank that is killed could not bring it back."""
        return False

    def on_broken_pipe(self) -> None:
        self.fall_silent("nobody reads it any more")

    def fall_silent(self, why: str) -> None:
        """Print nothing from here on; what waits in the stream goes nowhere."""
        self.quiet = True
        to_nowhere(self.file)
        _warn(f"Standard output is closed ({why}): nothing more is printed there. The log files go on.")


class Console:
    """Lines on stdout, with a progress bar below them on a terminal and nothing but the lines in a pipe.

    A run does not end with its reader (`terrazzo train ... | head`), or for a full disk under its output: it goes on
    without lines, and says so on stderr.
    """

    def __init__(self) -> None:
        self._console = _UnreadConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 in a pipe."""
        return self._console.width

    def wrapped(self, text: str, indent: int) -> str:
        """`text` over as many lines of the terminal as it takes, all but the first indented; in a pipe as it is."""
        if not self._console.is_terminal or len(text) <= self.width:
            return text
        room, words = max(self.width, indent + 20), " " * indent
        lines = textwrap.wrap(text, room, subsequent_indent=words, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    def begin(self, steps: int, first_step: int = 0) -> None:
        """Show how far the run has come, on a terminal."""
        if self._console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("elapsed"),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=steps, completed=first_step)
            self._progress.start()

    def say(self, text: str, *, needed: bool = False) -> None:
        """Print `text` as it is, at once; on stderr what is `needed` where nobody reads standard output any more."""
        if self._console.quiet and needed:
            _warn(text)
            return
        try:
            self._console.print(text, markup=False)
            self._console.file.flush()
        except OSError as error:
            self._console.fall_silent(error.strerror or str(error))

    def advance(self, step: int) -> None:
        """The run stands behind this step: a later one than before, or an earlier one that it went back to."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
