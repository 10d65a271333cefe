"""Standard output of a run: lines, and below them on a terminal how far it has come."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from terrazzo.files import to_nowhere
from terrazzo.telemetry.log.sinks import warn_on_stderr

__all__ = ["RunConsole"]


class _UnreadConsole(Console):
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
        warn_on_stderr(f"Standard output is closed ({why}): nothing more is printed there. The log files go on.")


class RunConsole:
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
            warn_on_stderr(text)
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
