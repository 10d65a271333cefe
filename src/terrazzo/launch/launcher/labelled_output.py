"""Prefixes each line that a rank prints with its number."""

from __future__ import annotations

import contextlib
import os
import select

__all__ = ["LabelledOutput"]

_AT_ONCE = 1 << 20
"""Bytes read at a time: as many as a pipe can hold, so that one read takes all that an ended rank has left."""
_LONGEST = 1 << 16
"""Longest incomplete line, in bytes, that is held back until its end comes."""


class LabelledOutput:
    """One stream of one rank: the rank writes to `theirs`; what is read from `line` is written to `target`.

    Only complete lines are written. Of lines that overwrite themselves by carriage returns, as progress bars do, the
    last state is.
    """

    def __init__(self, label: str, target: int) -> None:
        self.line, self.theirs = os.pipe()
        os.set_blocking(self.line, False)
        self._label, self._target = label.encode(), target
        self._unended = b""

    def close_writing_end(self) -> None:
        """Close this process's copy of the writing end, which the rank has by now."""
        os.close(self.theirs)

    def read(self) -> bool:
        """Pass on what has been written; returns False when the stream has ended."""
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
        """Pass on a last incomplete line, and close."""
        if self._unended:
            self._write([self._unended])
        os.close(self.line)

    def _write(self, lines: list[bytes]) -> None:
        left = memoryview(b"".join(self._label + _last_state(line) + b"\n" for line in lines))
        while left:
            try:
                left = left[os.write(self._target, left) :]
            except BlockingIOError:  # whoever reads has made it so, and is behind
                select.select([], [self._target], [])
            except OSError as error:  # nobody reads any more, or a full disk: the ranks go on
                _say_once(self._target, error)
                return


def _say_once(target: int, error: OSError) -> None:
    """Say on stderr that lines of ranks are lost, unless somebody has left on purpose, as `| head` does."""
    if not isinstance(error, BrokenPipeError) and target not in _LOST:
        _LOST.add(target)
        with contextlib.suppress(OSError):  # it may be as full
            os.write(2, f"Output of the ranks cannot be written ({error.strerror}), and they go on.\n".encode())


_LOST: set[int] = set()
"""Descriptors of which it has been said that lines are lost."""


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
