"""One rank of a script: `python -m terrazzo.launch.script.script_rank SCRIPT ...`, or `-m MODULE` for the script.

The script runs as `__main__`, as if by itself. Its uncaught exception goes to the launcher, which shows the first one.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from terrazzo.errors import BadInput, ConnectionLost, Misuse, TimedOut, lost_a_rank
from terrazzo.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from terrazzo.launch.launcher_pipe import REPORT, Failure, LauncherPipe, Milestone, cause_of
from terrazzo.processes import tether
from terrazzo.processes.tether import become

__all__ = ["own_frames"]


def own_frames(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """The traceback of an error from the script's first frame on, without those of its launcher.

    Of a mistake in the script, which the message explains, it ends where the script has called into this package.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHERS:
        trace = trace.tb_next
    last = trace if isinstance(error, BadInput | Misuse | ConnectionLost | TimedOut) else None
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            last.tb_next = None
        last = last.tb_next
    return trace


_LAUNCHERS = {__file__, tether.__file__, "<frozen runpy>", find_spec.__code__.co_filename}
_PACKAGE = os.path.join(str(Path(__file__).parents[2]), "")


class _Ending:
    """Reports the script's own end once, before the end of this process breaks the connections of other ranks."""

    def __init__(self, rank: int, launcher: LauncherPipe) -> None:
        self._rank, self._launcher, self._pid = rank, launcher, os.getpid()

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an uncaught exception, as `sys.excepthook`. A script that sets its own hook replaces it."""
        now, trace = time.monotonic_ns(), own_frames(error, trace)
        if os.getpid() != self._pid:  # a fork of this rank
            sys.__excepthook__(kind, error, trace)
            return
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED
        failure = Failure(self._rank, now, code, text, cause_of(error), lost=lost_a_rank(error))
        self._launcher.fail(failure, error)

    def leave(self, leaving: SystemExit) -> None:
        """Report an end by `sys.exit`, for which Python has no hook."""
        code = leaving.code & 0xFF if isinstance(leaving.code, int) else FAILED  # as the system will
        if leaving.code is not None and code not in (0, PREEMPTED) and os.getpid() == self._pid:
            message = f"sys.exit({leaving.code!r}) was called on rank {self._rank}."
            self._launcher.fail(Failure(self._rank, time.monotonic_ns(), code, message), leaving)


def _main() -> None:
    launcher = LauncherPipe(int(os.environ.pop(REPORT)))  # what this rank starts is not this rank
    ending = _Ending(int(os.environ["RANK"]), launcher)
    sys.excepthook = ending.excepthook
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # also into a pipe or file: lines of ranks in the order of time
            stream.reconfigure(line_buffering=True, write_through=False)  # PYTHONUNBUFFERED writes a line's end apart
    launcher.reach(Milestone.READY)
    try:
        become(sys.argv[1:])
    except SystemExit as leaving:
        ending.leave(leaving)
        raise


if __name__ == "__main__":
    _main()
