"""A progress bar for the verbs of `terrazzo checkpoint` that read whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["progress"]


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, gone when the block ends; elsewhere nothing."""
    console = Console(stderr=True)
    parts = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    label_column, hidden = TextColumn("{task.description}", markup=False), not console.is_terminal
    with Progress(label_column, *parts, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count_bytes: bar.advance(task, count_bytes)
