"""Lines that a rank prints, with its number before each."""

from __future__ import annotations

import contextlib
import os

__all__ = ["LabelledOutput"]

_AT_ONCE = 1 << 20
"""How many bytes are read at a time: as many as a pipe can hold, so that nothing of a rank that has ended is left."""
_LONGEST = 1 << 16
"""The longest line, in bytes, that is kept back until its end comes."""


class LabelledOutput:
    """One stream of one rank: `theirs` is what it writes to, `line` what is read here and written to `target`.

    A line is written once it is whole. Of what overwrites itself by carriage returns, as progress bars do, the last
    state is.
    """

    def __init__(self, label: str, target: int) -> None:
        self.line, self.theirs = os.pipe()
        os.set_blocking(self.line, False)
        self._label, self._target = label.encode(), target
        self._unended = b""

    def close_writing_end(self) -> None:
        """Let go, in this process, of the end that the rank has by now."""
        os.close(self.theirs)

    def read(self) -> bool:
        """Pass on what is there; False when no more will come."""
        try:
            data = os.read(self.line, _AT_ONCE)
        except BlockingIOError:
            return True
        *lines, rest = (self._unended + data).split(b"\n")
        self._unended = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")  # what comes overwrites it
        if len(self._unended) > _LONGEST:
            lines, self._unended = [*lines, self._unended], b""
        self._write(lines)
        return bool(data)

    def close(self) -> None:
        """Pass on a last line that has no end."""
        if self._unended:
            self._write([self._unended])
        os.close(self.line)

    def _write(self, lines: list[bytes]) -> None:
        left = memoryview(b"".join(self._label + _last_state(line) + b"\n" for line in lines))
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more, and the ranks go on
            while left:
                left = left[os.write(self._target, left) :]


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
