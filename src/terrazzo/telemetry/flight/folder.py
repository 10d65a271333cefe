"""Where the rings of a run are: in memory of its ranks while it goes on, in files of its folder when it has ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from terrazzo.ending import Ending
from terrazzo.engine import Engine
from terrazzo.engine.runtime.system import boot_id
from terrazzo.errors import BadInput
from terrazzo.files import replacing
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.flight.ring import FIELDS, Flight, Ring, Tail, read_flight
from terrazzo.telemetry.log.run_folder import RunFolder, rank_files

__all__ = ["FlightRecorder", "flights_of", "save_flight", "tails_of"]


class FlightRecorder:
    """One rank's ring, and the recorder that writes it.

    Args:
        rank: of this process, among `world`.
        ring_descriptor: of a ring whose memory outlives this process; None for one of its own, which is put into the
            run's folder when this object is closed or gone, or the process exits.

    Attributes:
        events: takes what the engine tells.
        descriptor: of the ring.
        watched: whether the process that the ring is of may look after this one.
    """

    def __init__(self, rank: int, world: int, ring_descriptor: int | None = None) -> None:
        descriptor = Ring.memory() if ring_descriptor is None else ring_descriptor
        os.set_inheritable(descriptor, False)
        self.events, self._rank = RingRecorder(Ring(descriptor), rank, world), rank
        self.watched = ring_descriptor is not None
        self.descriptor = descriptor
        self._saving: Ending | None = None

    def follow(self, engine: Engine, folder: Path) -> None:
        """Record what this engine does, for a run of this folder. What an earlier run has left there is removed."""
        folder = folder.absolute()
        self.events.follow(engine, folder=str(folder))
        with contextlib.suppress(OSError):  # a full disk: the run goes on
            _clear(folder, self.events.table)
            live = {"pid": os.getpid(), "descriptor": self.descriptor, "boot": boot_id()}
            _live(folder, self._rank).write_text(json.dumps(live))
        if not self.watched:
            self._saving = Ending(self, functools.partial(_save, self.descriptor))

    def close(self) -> None:
        """Nothing more is recorded of this run; where nobody else does so, what has been is put into its folder."""
        if self._saving is not None:
            self._saving()


def _save(descriptor: int) -> None:
    save_flight(Tail(descriptor).flight())
    os.close(descriptor)  # the ring is mapped until its recorder is gone


def save_flight(flight: Flight) -> None:
    """Put it into the run's folder, which its table names; nothing where it names none yet, or the disk is full."""
    if (folder := flight.table.get("folder")) is None:
        return
    rank = flight.table["rank"]
    with contextlib.suppress(OSError):
        with replacing(_ended(Path(folder), rank), sync=False) as beside:
            beside.write_bytes(flight.as_bytes())
        _live(Path(folder), rank).unlink(missing_ok=True)


def flights_of(run: Path) -> list[Flight]:
    """What the ranks of a run have recorded so far, in their order.

    Args:
        run: its folder.

    Raises:
        BadInput: there is nothing.
    """
    by_rank = {}
    for path in sorted(RunFolder(run).flight.glob("rank-*.*")):
        with contextlib.suppress(OSError):
            if path.suffix == ".live":
                flight = _read_live(path)
            elif path.suffix == ".ended":
                flight = read_flight(path)
            else:
                continue
            if flight is not None and flight.table.keys() >= FIELDS:
                by_rank[flight.table["rank"]] = flight
    if not by_rank:
        raise BadInput(
            f"'{run}' has no flight record: give the folder of a run of `terrazzo train`, which log.folder names, or of"
            " tz.telemetry.attach. Ranks that torchrun or srun has started leave none if they are killed in their first"
            " seconds."
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def tails_of(run: Path) -> dict[int, Tail]:
    """What the ranks of a run that go on now, on this machine, write to; by rank."""
    by_rank = {}
    for path in sorted(RunFolder(run).flight.glob("rank-*.live")):
        with _of_others(), contextlib.suppress(OSError):
            if (memory := _memory(path)) is not None and memory.is_file():
                with memory.open("rb") as file:
                    tail = Tail(file.fileno())
                if tail.table.keys() >= FIELDS:
                    by_rank[int(tail.table["rank"])] = tail
    return by_rank


def _read_live(path: Path) -> Flight | None:
    """From the memory of a process that goes on; None where it is another machine's, or there is none any more."""
    with _of_others():
        if (memory := _memory(path)) is not None:
            return read_flight(memory)
    return None


def _memory(path: Path) -> Path | None:
    """Where a rank's events are that has said so at `path`; None where that is on another machine."""
    live = json.loads(path.read_text())
    return Path(f"/proc/{int(live['pid'])}/fd/{int(live['descriptor'])}") if live["boot"] == boot_id() else None


def _of_others() -> AbstractContextManager[None]:
    """Suppresses what reading there may raise: another process may have that number now."""
    return contextlib.suppress(BadInput, ValueError, KeyError, TypeError)


def _clear(folder: Path, table: Mapping[str, Any]) -> None:
    """Remove what this rank has left in an earlier run; the first one does so of ranks that there are no more."""
    flight = RunFolder(folder).flight
    flight.mkdir(parents=True, exist_ok=True)
    for rank, path in rank_files(flight):
        if rank == table["rank"] or (table["rank"] == 0 and rank >= table["world"]):
            path.unlink(missing_ok=True)


def _live(folder: Path, rank: int) -> Path:
    return RunFolder(folder).flight / f"rank-{rank:05}.live"


def _ended(folder: Path, rank: int) -> Path:
    return RunFolder(folder).flight / f"rank-{rank:05}.ended"
