"""What a rank records, in memory of the process that has started it: its flight, and where its threads are when asked.

Both outlive the rank. Ranks that others have started, and one alone, record into memory of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from terrazzo.telemetry.flight.folder import FlightRecorder, save_flight
from terrazzo.telemetry.flight.ring import Ring, Tail
from terrazzo.telemetry.watchdog.rank_progress import RankProgress

__all__ = ["ASK", "DESCRIPTORS", "Recording", "open_flight_recorder", "threads_memory"]

DESCRIPTORS = "TERRAZZO_FLIGHT"
"""A variable of a rank's environment: the descriptors of its ring, and of the file that its threads write to."""

ASK = signal.SIGUSR2
"""Asks a rank where its threads are."""


class Recording:
    """The memory that one rank writes to, in another process, as a rule the one that starts it.

    Args:
        descriptors: of memory that is there already: the ring, and what its threads write to.

    Attributes:
        tail: what it has recorded.
    """

    def __init__(self, descriptors: tuple[int, int] | None = None) -> None:
        self._ring, self._threads = descriptors or (Ring.memory(), threads_memory())
        self.tail = Tail(self._ring)

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the rank gets in its environment, as `DESCRIPTORS` says."""
        return self._ring, self._threads

    @property
    def threads(self) -> str:
        """Where its threads were when it was asked; empty as long as it has not answered."""
        size = os.fstat(self._threads).st_size
        return os.pread(self._threads, size, 0).decode(errors="replace")

    @property
    def at(self) -> str:
        """Where it was last, in words that follow a sentence; empty before the first step."""
        if (step := self.step) is None:
            return ""
        progress = RankProgress()
        progress.take(self.tail.table, self.tail.flight().events)
        return f", in {f'phase {progress.phase} of ' if progress.phase else ''}step {step + 1}"

    @property
    def step(self) -> int | None:
        """The newest step that it has ended; None before the first."""
        return self.tail.step

    def save(self) -> None:
        """Put what it has recorded into the run's folder."""
        save_flight(self.tail.flight())

    def close(self) -> None:
        """The rank has ended: save what it has recorded."""
        self.save()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def threads_memory() -> int:
    """A descriptor of memory for where threads are."""
    made = os.memfd_create("terrazzo-threads") if hasattr(os, "memfd_create") else Ring.memory()
    os.ftruncate(made, 0)
    return made


def open_flight_recorder(rank: int, world: int) -> FlightRecorder:
    """This rank's flight recorder. From now on `ASK` has it write where its threads are, if somebody reads that."""
    inherited = os.environ.pop(DESCRIPTORS, None)  # what this rank starts is not this rank
    if inherited is None:
        return FlightRecorder(rank, world)
    ring, threads = map(int, inherited.split(","))
    os.set_inheritable(threads, False)
    faulthandler.register(ASK, file=threads, all_threads=True, chain=False)
    return FlightRecorder(rank, world, ring)
