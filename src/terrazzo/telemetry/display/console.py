"""Standard output of a run: lines, and on a terminal a progress bar below them."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from terrazzo.processes.standard_streams import say_on_stderr, to_nowhere

__all__ = ["RunConsole"]


class _UnreadConsole(Console):
    """Falls silent when nobody reads standard output any more; rich would end the process."""

    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: a rank that is killed could not show it again."""
        return False

    def on_broken_pipe(self) -> None:
        self.fall_silent("nobody reads it any more")

    def fall_silent(self, why: str) -> None:
        """Print nothing from now on, and drop what is still in the stream's buffer."""
        self.quiet = True
        to_nowhere(self.file)
        say_on_stderr(f"Standard output is closed ({why}): nothing more is printed there. The log files go on.")


class RunConsole:
    """Prints lines on stdout, with a progress bar below them if that is a terminal.

    A run does not end because its reader does (`terrazzo train ... | head`), or because the disk under its output is
    full: it goes on without lines, and says so on stderr.
    """

    def __init__(self) -> None:
        self._console = _UnreadConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 in a pipe."""
        return self._console.width

    def wrapped(self, text: str, indent: int) -> str:
        """`text` wrapped to the width of the terminal, all lines but the first indented; unchanged in a pipe."""
        if not self._console.is_terminal or len(text) <= self.width:
            return text
        room, words = max(self.width, indent + 20), " " * indent
        lines = textwrap.wrap(text, room, subsequent_indent=words, break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    def begin(self, steps: int, first_step: int = 0) -> None:
        """Start the progress bar, if this is a terminal."""
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
        """Print `text` as it is, at once. If nobody reads stdout any more, what is `needed` goes to stderr."""
        if self._console.quiet and needed:
            say_on_stderr(text)
            return
        try:
            self._console.print(text, markup=False)
            self._console.file.flush()
        except OSError as error:
            self._console.fall_silent(error.strerror or str(error))

    def advance(self, step: int) -> None:
        """Move the progress bar to this finished step; it may be an earlier one, after a rollback."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
