"""The ranks that this process starts: processes that end with it, and pipes on which they report.

Nothing of this is in the file system, so nothing can be left behind there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from terrazzo.exit_codes import PREEMPTED
from terrazzo.launch.environment import RUN_ID
from terrazzo.launch.launcher.labelled_output import LabelledOutput, OutputTarget
from terrazzo.launch.launcher_pipe import REPORT, SIBLING_GRACE_S, Failure, Milestone
from terrazzo.launch.stopping.received_signals import ASKING, ReceivedSignals
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.processes.system import is_ending, is_stopped
from terrazzo.processes.tether import interpreter_flags, tethered
from terrazzo.telemetry.watchdog.evidence import Suspect
from terrazzo.telemetry.watchdog.memory_kills import MemoryKills
from terrazzo.telemetry.watchdog.recording import ASK, DESCRIPTORS, Recording
from terrazzo.telemetry.watchdog.stall import Stall
from terrazzo.telemetry.watchdog.watchdog import Patience, Watchdog

__all__ = ["LaunchSpec", "LocalRank", "LocalRanks"]

_POLL_S = 0.1
_STOPPING_S = 30.0  # time for ranks that were asked to stop to save, once one of them has ended
_UNREAD_S = 2.0  # time for whoever reads what ranks have printed
_UNKILLABLE_S = 10.0  # the kernel may keep a killed process for as long as a device or file system does not answer


@dataclass(frozen=True)
class LaunchSpec:
    """What to start: `ranks` processes of `python WORDS`, with additions to their environment."""

    ranks: int
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalRank:
    """The process of one rank.

    Args:
        rank: its number.
        environment: of the process, without what is this rank's own.
        arguments: words after `python`.
        outputs: for stdout and stderr, if its lines get labels; empty leaves both as this process has them.
        recording: the memory that it records into, if it is watched.

    Attributes:
        code: its exit code once it has ended, negative for a signal.
        ended_ns: when it ended, on the clock of a `Failure`, as seen from here: a little late.
        failure: what it has reported of its failure.
        reached: the milestones that it has reported.
        stopped: whether a signal such as SIGSTOP had stopped it when another rank failed.
        ended_by_us: whether this process has killed it.
    """

    def __init__(
        self,
        rank: int,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        outputs: Sequence[LabelledOutput] = (),
        recording: Recording | None = None,
    ) -> None:
        self.rank, self.outputs, self.reached = rank, outputs, set[Milestone]()
        self.ended_by_us = self.stopped = False
        self._recording = recording
        self.code: int | None = None
        self.ended_ns: int | None = None
        self.failure: Failure | None = None
        self.line, theirs = os.pipe()
        self._unread = b""
        numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        descriptors = recording.descriptors if recording is not None else ()
        recorded = {DESCRIPTORS: ",".join(map(str, descriptors))} if descriptors else {}
        stdout, stderr = [output.theirs for output in outputs] or (None, None)
        try:
            os.set_blocking(self.line, False)
            self._process = subprocess.Popen(
                tethered(*arguments, flags=interpreter_flags()),
                env={**environment, **numbers, **recorded, REPORT: str(theirs)},
                pass_fds=[theirs, *descriptors],
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            os.close(theirs)
            for output in outputs:
                output.close_writing_end()
        for output in outputs:
            output.start()

    def read(self) -> bool:
        """Take in what it reports; returns False when its pipe is closed."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.line, 1 << 16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._take_message(json.loads(line))
            self._note_end()  # sooner than the system has its exit code
            return False
        return True

    @property
    def failed(self) -> bool:
        """Whether it has reported a failure, or ended with an exit code that is one."""
        return self.failure is not None or self.code not in (None, 0, PREEMPTED)

    def poll(self) -> None:
        """See whether it has ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = code
            self._note_end()

    def look_whether_stopped(self) -> None:
        """Note whether it is stopped: another rank has failed, perhaps waiting for this one."""
        self.stopped = self.code is None and is_stopped(self._process.pid)

    @property
    def at(self) -> str:
        """Where it was last; see `Recording.at`."""
        return self._recording.at if self._recording is not None else ""

    @property
    def step(self) -> int | None:
        """The newest step that it has finished, if it records."""
        return self._recording.step if self._recording is not None else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def ask(self) -> bool:
        """Ask for the stacks of its threads; returns False if it cannot answer."""
        able = self.code is None and not is_stopped(self.pid)
        if able:
            self.send(ASK)
        return able

    def end(self) -> None:
        """Kill it, unless it has ended or is about to: its connections close before it has an exit code."""
        self.poll()
        if self.code is None and not is_ending(self._process.pid):
            self.ended_by_us = True
            self._process.kill()

    def _note_end(self) -> None:
        self.ended_ns = self.ended_ns or time.monotonic_ns()

    def _take_message(self, message: dict[str, object]) -> None:
        if "reached" in message:
            self.reached.add(Milestone(str(message["reached"])))
        if isinstance(failure := message.get("failure"), dict):
            self.failure = Failure(**failure)


class LocalRanks:
    """All ranks of a run on this machine. Leaving the `with` block ends those that are left.

    They meet at a store that this process serves on a free port, and their environment has what torchrun sets.

    Args:
        start: how many ranks, and what each runs.
        defaults: environment variables, for those that this process does not have.
        labelled: whether lines of all ranks but the first begin with the rank's number.
        patience: with ranks that stand still, which then record what they do; None does not watch them.

    Attributes:
        ranks: the ranks, in order.
        stall: why the ranks stood still, if `wait` has returned for that.
    """

    def __init__(
        self,
        start: LaunchSpec,
        defaults: Mapping[str, str],
        *,
        labelled: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment = {
            **defaults,
            **os.environ,
            **start.environment,
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(start.ranks)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 does not serve a store of its own
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": RUN_ID,  # which says to others that ranks are started already
        }
        self._memory_kills = MemoryKills()
        self.ranks: list[LocalRank] = []
        self.stall: Stall | None = None
        self.recordings: list[Recording] = []
        self._lines = selectors.DefaultSelector()
        self._watchdog: Watchdog | None = None
        targets = [OutputTarget(descriptor) for descriptor in (1, 2)] if labelled else []
        try:
            for number in range(start.ranks):
                outputs = [LabelledOutput(f"[rank {number}] ", target) for target in targets] if number else []
                recording = Recording() if patience is not None else None
                self.recordings += [] if recording is None else [recording]
                self.ranks.append(rank := LocalRank(number, environment, start.words, outputs, recording))
                self._lines.register(rank.line, selectors.EVENT_READ, rank)
            if patience is not None:
                recorded = {each.rank: (each.recording.tail, each.pid) for each in self.suspects}
                self._watchdog = Watchdog(recorded, patience)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self, signals: ReceivedSignals, on_stop: Callable[[], None] = lambda: None) -> int | None:
        """Wait until all have ended, one has failed, or they stand still; returns the signal that ends the run at once.

        The first signal asks for a stop and is passed on; `on_stop` is called unless a rank has failed by then. When a
        rank fails, the others have some seconds to fail by themselves.
        """
        heeded, deadline = 0, float("inf")
        while any(rank.code is None for rank in self.ranks):
            self._listen(_POLL_S)
            if len(signals.received) > heeded:
                number = signals.received[heeded]
                heeded += 1
                asks = number in ASKING and self.any_reached(Milestone.READY)
                if heeded > 1 or not asks:
                    return number
                if not any(rank.failed for rank in self.ranks):
                    on_stop()
                self._pass_on(number)
            if deadline == float("inf") and any(rank.failed for rank in self.ranks):
                for rank in self.ranks:
                    rank.look_whether_stopped()
                # Ranks that are not ready cannot report anything yet.
                saying = any(Milestone.READY in rank.reached and rank.code is None for rank in self.ranks)
                grace_s = _STOPPING_S if heeded else SIBLING_GRACE_S
                deadline = time.monotonic() + (grace_s if saying else 0.0)
            if time.monotonic() > deadline or self._stands_still():
                break
        return None

    def any_reached(self, milestone: Milestone) -> bool:
        """Whether any rank has reported this milestone."""
        return any(milestone in rank.reached for rank in self.ranks)

    def _stands_still(self) -> bool:
        """Whether the ranks stand still for good."""
        if self._watchdog is None or any(rank.failed or rank.code is not None for rank in self.ranks):
            return False
        self.stall = self._watchdog.look()
        return self.stall is not None

    @property
    def suspects(self) -> list[Suspect]:
        """The ranks, for keeping evidence of what they do; only if they record."""
        recorded = zip(self.ranks, self.recordings, strict=True)
        return [Suspect(rank.rank, rank.pid, recording, rank.ask) for rank, recording in recorded]

    @property
    def oom_kills(self) -> int | None:
        """Processes that the kernel has killed for lack of memory since the start; None if it does not tell."""
        return self._memory_kills.count

    def end(self) -> None:
        """Kill the ranks that are left, and wait for them, within reason."""
        for rank in self.ranks:
            rank.end()
        deadline = time.monotonic() + _UNKILLABLE_S
        while any(rank.code is None for rank in self.ranks) and time.monotonic() < deadline:
            self._listen(_POLL_S)
        self._listen(0.0)
        self._lines.close()
        for rank in self.ranks:
            os.close(rank.line)
            for output in rank.outputs:
                output.finish()
        for recording in self.recordings:
            recording.close()

    def await_output(self, signals: ReceivedSignals, *, at_last: bool = False) -> None:
        """Once all have ended: wait until what they have printed is written, within reason.

        Args:
            at_last: what has not been written is lost after this, which is said: wait until a stop is asked for.
        """
        deadline = time.monotonic() + (float("inf") if at_last else _UNREAD_S)
        while not all(output.is_finished(_POLL_S) for rank in self.ranks for output in rank.outputs):
            if signals.received:
                deadline = min(deadline, time.monotonic() + _UNREAD_S)
            if time.monotonic() > deadline:
                if at_last:
                    say_on_stderr("The last lines of the ranks are lost: nobody reads them.")
                return

    def _pass_on(self, number: int) -> None:
        """Send a signal to the ranks that handle it by now. Others would die; in the trainer one rank is enough."""
        for rank in self.ranks:
            if Milestone.READY in rank.reached:
                rank.send(number)

    def _listen(self, patience_s: float) -> None:
        """Take in what ranks report within this time, and see which have ended."""
        for key, _ in self._lines.select(patience_s):
            if not key.data.read():
                self._lines.unregister(key.fileobj)
        for rank in self.ranks:
            rank.poll()
