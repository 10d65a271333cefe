"""The process that writes a rank's part of a checkpoint, as the rank sees it; what it runs is `writer_main`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading

from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.processes.ending import start_thread
from terrazzo.processes.tether import tethered

__all__ = ["BRIEF_S", "StandStill", "WriterProcess"]

BRIEF_S = 5.0
"""For what should take no time, on a file system that may not answer."""


class WriterProcess:
    """The process that writes, and the thread that hears from it."""

    def __init__(self, staging: int, patience_s: float) -> None:
        self._process = subprocess.Popen(
            tethered("-m", "terrazzo.checkpoint.saving.writer_main", str(staging), str(patience_s)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[staging],
            bufsize=0,  # a forked child has nothing to flush, and no lock that a thread of ours had
            start_new_session=True,
        )
        self.pid, self.beats = self._process.pid, 0
        self._answered = threading.Event()
        self._answered.set()
        self._problem: str | None = None

    def start(self, job: SaveJob) -> None:
        """Hand over a job."""
        self._answered.clear()
        thread = start_thread("terrazzo-saver", lambda: self._listen(job), self._process.kill)
        thread.patience_s = BRIEF_S  # asked, nobody waits for it any more, nor for a writer that cannot be killed

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def done(self, within_s: float = 0.0) -> bool:
        """Whether the newest job has come to an end."""
        return self._answered.wait(within_s)

    def problem(self) -> str | None:
        """What went wrong with the newest job, once it is done."""
        return self._problem

    def stop(self) -> bool:
        """Kill it if it is at a job; False if the system does not let go of it."""
        if not self.done():
            self._process.kill()
        return self.done(BRIEF_S)

    def end(self, patience_s: float) -> None:
        """Let it finish what it is at, for so long at most, and end it; leave it where the system does not let go."""
        self._answered.wait(patience_s)
        self._process.kill()  # an idle one too: a process forked from this one would keep its input open
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(BRIEF_S)
        if self.done(BRIEF_S):  # else the thread that listens has the pipes
            self.hang_up()

    def hang_up(self) -> None:
        """Nothing is said to it, or heard from it, any more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def _listen(self, job: SaveJob) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            line = memoryview(f"{job.to_json()}\n".encode())
            while line:
                line = line[self._process.stdin.write(line) :]
            for answer in iter(self._process.stdout.readline, b""):
                message = json.loads(answer)
                if "problem" in message:
                    self._problem = message["problem"]
                    break
                self.beats += 1
            else:
                self._problem = self._died()
        except (OSError, ValueError, KeyError):
            self._problem = self._died()
        finally:
            self._answered.set()

    def _died(self) -> str:
        self._process.kill()
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process that writes it was {how}."


class StandStill:
    """How long a writer has stood still while somebody waited for it; time in which nobody could wait is none."""

    def __init__(self, writer: WriterProcess, patience_s: float) -> None:
        self._writer, self._patience_s = writer, patience_s
        self._round_s = min(1.0, patience_s / 8)
        self._beats, self._silent_s = writer.beats, 0.0

    def late(self) -> bool:
        """Whether it has been too long; waits a moment for the end of the job."""
        if self._writer.done(self._round_s):
            return False
        self._silent_s = self._silent_s + self._round_s if self._writer.beats == self._beats else 0.0
        self._beats = self._writer.beats
        return self._silent_s >= self._patience_s
