"""The memory that a rank records into: its ring, and the stacks of its threads when it is asked for them.

The launcher makes it for the ranks that it starts, so that it outlives them. Other ranks make their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from terrazzo.processes.system import memory_file
from terrazzo.telemetry.flight.folder import FlightRecorder, save_flight
from terrazzo.telemetry.flight.ring import Ring, Tail
from terrazzo.telemetry.watchdog.rank_progress import RankProgress

__all__ = ["ASK", "DESCRIPTORS", "Recording", "open_flight_recorder", "threads_memory"]

DESCRIPTORS = "TERRAZZO_FLIGHT"
"""Environment variable of a rank: the descriptors of its ring, and of the memory for its threads' stacks."""

ASK = signal.SIGUSR2
"""The signal that asks a rank for the stacks of its threads."""


class Recording:
    """The memory of one rank's recording, as another process sees it: a launcher or a warden.

    Args:
        descriptors: of the rank's ring and of the memory for stacks, if they exist; None makes both.

    Attributes:
        tail: reads the ring.
    """

    def __init__(self, descriptors: tuple[int, int] | None = None) -> None:
        self._ring, self._threads = descriptors or (Ring.memory(), threads_memory())
        self.tail = Tail(self._ring)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The value of `DESCRIPTORS` in the rank's environment: those of the ring and of the stacks."""
        return self._ring, self._threads

    @property
    def threads(self) -> str:
        """The stacks of its threads when it was asked; empty as long as it has not answered."""
        size = os.fstat(self._threads).st_size
        return os.pread(self._threads, size, 0).decode(errors="replace")

    @property
    def at(self) -> str:
        """Where the rank was last, as words that continue a sentence; empty before the first step."""
        if (step := self.step) is None:
            return ""
        progress = RankProgress()
        progress.take(self.tail.table, self.tail.flight().events)
        return f", in {f'phase {progress.phase} of ' if progress.phase else ''}step {step + 1}"

    @property
    def step(self) -> int | None:
        """The newest step that the rank has finished; None before the first."""
        return self.tail.step

    def save(self) -> None:
        """Write the flight into the run's folder."""
        save_flight(self.tail.flight())

    def close(self) -> None:
        """The rank has ended: save its flight, and free the memory."""
        self.save()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def threads_memory() -> int:
    """A descriptor of new memory for the stacks of a rank's threads."""
    return memory_file("terrazzo-threads")


def open_flight_recorder(rank: int, world: int) -> FlightRecorder:
    """This rank's flight recorder. If a launcher has made its memory, `ASK` writes the threads' stacks from now on."""
    inherited = os.environ.pop(DESCRIPTORS, None)  # processes that this rank starts must not inherit it
    if inherited is None:
        return FlightRecorder(rank, world)
    ring, threads = map(int, inherited.split(","))
    os.set_inheritable(threads, False)
    faulthandler.register(ASK, file=threads, all_threads=True, chain=False)
    return FlightRecorder(rank, world, ring)
