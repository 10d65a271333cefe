"""Where metrics go: the console, `metrics.jsonl`, and TensorBoard event files. Only rank 0 has any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Console", "JsonLines", "Sink", "TensorBoard"]


class Sink(Protocol):
    """Takes named numbers of a step."""

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write `values` of `step`; `kind` is `train`, `validation`, `sample` or `summary`."""
        ...

    def close(self) -> None:
        """Flush and release what is open."""
        ...


class JsonLines:
    """One JSON object per line. When a run resumes, lines of steps that are done again are dropped."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Append to `path` from `first_step` on; 0 starts the file anew."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _lines(path) if first_step else []
        kept = [line for line in before if line["step"] <= first_step and line["kind"] != "summary"]
        self._file = path.open("w", encoding="utf-8")
        for line in kept:
            self._write(line)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line and flush it, so that a killed run keeps what it had measured."""
        self._write({"kind": kind, "step": step, **values})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of an earlier run; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


class TensorBoard:
    """TensorBoard event files, every number as `kind/name`."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """A new run (`first_step` 0) starts anew; a resumed one hides the later steps that an earlier one wrote."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        for old in folder.glob("events.out.tfevents.*") if not first_step else ():
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write numbers as scalars and text as text."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(f"{kind}/{name}", value, step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class Console:
    """Lines on stdout, with a progress bar below them on a terminal and nothing but the lines in a pipe."""

    def __init__(self, steps: int, first_step: int = 0) -> None:
        self._console = RichConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(TextColumn("training"), *columns, console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=steps, completed=first_step)
            self._progress.start()

    def say(self, text: str) -> None:
        """Print `text` as it is, at once."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def advance(self) -> None:
        """One more step is done."""
        if self._progress is not None:
            self._progress.advance(self._task)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
