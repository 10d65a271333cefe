"""Prefixes each line that a rank prints with its number."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Sequence

from terrazzo.processes.standard_streams import say_on_stderr

__all__ = ["LabelledOutput", "OutputTarget"]

_AT_ONCE = 1 << 20
"""Bytes read at a time: as many as a pipe can hold, so that one read takes all that an ended rank has left."""
_LONGEST = 1 << 16
"""Longest incomplete line, in bytes, that is held back until its end comes."""
_POLL_S = 0.1


class OutputTarget:
    """A descriptor of this process to which lines of several ranks are written: stdout or stderr."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = threading.Lock()
        self._has_lost = False

    def write(self, lines: Sequence[bytes]) -> None:
        """Write whole lines, of one rank at a time. Waits for whoever reads; what cannot be written is left out."""
        with self._turn:
            try:
                for piece in _pieces(lines):
                    self._write(piece)
            except OSError as error:  # nobody reads any more, or a full disk: the ranks go on
                self._say_once(error)

    def _write(self, piece: bytes) -> None:
        left = memoryview(piece)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # whoever reads has made it so, and is behind
                select.select([], [self._descriptor], [])

    def _say_once(self, error: OSError) -> None:
        """Say on stderr that lines of ranks are lost, unless somebody has left on purpose, as `| head` does."""
        if not isinstance(error, BrokenPipeError) and not self._has_lost:
            self._has_lost = True
            say_on_stderr(f"Output of the ranks cannot be written ({error.strerror}), and they go on.")


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Lines in pieces that a pipe takes whole: the first rank writes to it too. A longer line is a piece by itself."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) >= select.PIPE_BUF:
            yield piece
            piece = b""
        piece += line + b"\n"
    if piece:
        yield piece


class LabelledOutput:
    """One stream of one rank: the rank writes to `theirs`; what is read from there is written to `target`.

    Only complete lines are written. Of lines that overwrite themselves by carriage returns, as progress bars do, the
    last state is. A thread passes them on: where nobody reads, it waits in a write, which begins again after signals
    (PEP 475), and the rank waits too once its pipe is full, as it would by itself; the launcher goes on.
    """

    def __init__(self, label: str, target: OutputTarget) -> None:
        self._line, self.theirs = os.pipe()
        os.set_blocking(self._line, False)
        self._label, self._target = label.encode(), target
        self._unended = b""
        self._rank_has_ended = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True, name="terrazzo-output")

    def close_writing_end(self) -> None:
        """Close this process's copy of the writing end, which the rank has by now."""
        os.close(self.theirs)

    def start(self) -> None:
        """Pass on, in a thread, what is printed from now on, until `finish`."""
        self._thread.start()

    def finish(self) -> None:
        """Have the thread end after what there is: the rank has ended, though others may hold its pipe."""
        self._rank_has_ended.set()

    def is_finished(self, patience_s: float) -> bool:
        """Whether all has been passed on within this time, after `finish`."""
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _pass_on(self) -> None:
        has_ended = False
        while not has_ended:
            has_ended = self._rank_has_ended.is_set()  # before what is read: that is then the last
            if select.select([self._line], [], [], 0.0 if has_ended else _POLL_S)[0] and not self.read():
                break
        self.close()

    def read(self) -> bool:
        """Pass on what has been written; returns False when the stream has ended."""
        try:
            data = os.read(self._line, _AT_ONCE)
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
        os.close(self._line)

    def _write(self, lines: Sequence[bytes]) -> None:
        self._target.write([self._label + _last_state(line) for line in lines])


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
