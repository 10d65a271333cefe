"""The layout of a run's screen: labelled rows, notes, and the table with remarks between its rows."""

from __future__ import annotations

from collections.abc import Collection

from terrazzo.config import without_passwords
from terrazzo.messages import printable
from terrazzo.shell_command import fold_command
from terrazzo.telemetry import RunConsole, StepMetrics, StepTable

__all__ = ["RunScreen"]

LABEL = 10
"""Width of labels."""


class RunScreen:
    """The screen of rank 0. That of other ranks is silent.

    Args:
        speaks: whether this is rank 0.
        steps, known: as for `StepTable`.
    """

    def __init__(self, speaks: bool, steps: int, known: Collection[str]) -> None:
        self._console = RunConsole() if speaks else None
        self._width = self._console.width if self._console is not None else 0
        self._table = StepTable(steps, known, self._width)

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that prints."""
        return self._console is not None

    def begin(self, steps: int, step: int) -> None:
        """Print the header of the table, if there are steps to come, and start the progress bar."""
        if step < steps:
            self.say(f"\n{self._table.header()}")
        if self._console is not None:
            self._console.begin(steps, step)

    def advance(self, step: int) -> None:
        """Move the progress bar; see `RunConsole.advance`."""
        if self._console is not None:
            self._console.advance(step)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._console is not None:
            self._console.close()

    def say(self, text: str, *, needed: bool = False) -> None:
        """Print lines as they are, without passwords; `needed` as for `RunConsole.say`."""
        if self._console is not None:
            self._console.say(without_passwords(text), needed=needed)

    def row(self, label: str, text: str) -> None:
        """Print a text beside its label."""
        self.note(f"{label:<{LABEL}}{text}", LABEL)

    def note(self, text: str, indent: int = 2) -> None:
        """Print a text, wrapped to the width of the terminal."""
        if self._console is not None:
            self.say(self._console.wrapped(text, indent))

    def log_step(self, metrics: StepMetrics, left_s: float) -> None:
        """Print a row of the table; `left_s` as for `StepTable.row`."""
        self.say(self._table.row(metrics, left_s))

    def remark(self, step: int, text: str, loss: str = "") -> None:
        """Print a line about a step, between the rows of the table."""
        self.say(self._table.remark(step, text, loss))

    def command(self, label: str, command: str) -> None:
        """Print a command to be copied, on stderr if nobody reads stdout any more."""
        self.say(fold_command(f"{label:<{LABEL}}", command, self._width), needed=True)

    def on_one_line(self, text: str) -> str:
        """Text that a model has written, on one line, cut to what fits beside a label."""
        text, room = printable(" ".join(text.split())), self._width - LABEL
        return text if len(text) <= room else f"{text[: room - 4]} ..."
