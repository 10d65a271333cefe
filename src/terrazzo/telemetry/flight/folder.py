"""Where the rings of a run are: in the memory of its ranks while it runs, in files of its folder when it has ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from terrazzo.engine import Engine
from terrazzo.errors import BadInput
from terrazzo.files import replacing
from terrazzo.processes.ending import Ending
from terrazzo.processes.system import birth_of, boot_id, pid_namespace, state_of
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.flight.ring import FIELDS, Flight, Ring, Tail, read_flight
from terrazzo.telemetry.log.run_folder import RunFolder, rank_files
from terrazzo.telemetry.log.sinks import saying_unwritable

__all__ = ["FlightRecorder", "LiveRank", "flights_of", "ranks_are_gone", "save_flight", "tails_of"]


class FlightRecorder:
    """One rank's ring, and the recorder that writes to it.

    Args:
        rank: of this process, of `world` ranks.
        ring_descriptor: of a ring that another process has made, which saves it. None makes a new one, which is saved
            in the run's folder when this object is closed or garbage, or the process exits.

    Attributes:
        events: takes what the engine reports.
        descriptor: file descriptor of the ring.
        watched: whether another process made the ring, and so may look after this one.
    """

    def __init__(self, rank: int, world: int, ring_descriptor: int | None = None) -> None:
        descriptor = Ring.memory() if ring_descriptor is None else ring_descriptor
        os.set_inheritable(descriptor, False)
        self.events, self._rank = RingRecorder(Ring(descriptor), rank, world), rank
        self.watched = ring_descriptor is not None
        self.descriptor = descriptor
        self._saving: Ending | None = None

    def follow(self, engine: Engine, folder: Path) -> None:
        """Record what this engine does, for the run of this folder. This rank's files of an earlier run are removed."""
        folder = folder.absolute()
        self.events.follow(engine, folder=str(folder))
        with saying_unwritable(_live(folder, self._rank)):
            _clear(folder, self.events.table)
            _live(folder, self._rank).write_text(json.dumps(_told_of_this_process(self.descriptor)))
        if not self.watched:
            self._saving = Ending(self, functools.partial(_save, self.descriptor))

    def close(self) -> None:
        """Save the ring in the run's folder, unless another process does that."""
        if self._saving is not None:
            self._saving()


def _save(descriptor: int) -> None:
    save_flight(Tail(descriptor).flight())
    os.close(descriptor)  # the ring is mapped until its recorder is gone


def save_flight(flight: Flight) -> None:
    """Write a flight into the folder that its table names, if it names one; a disk that is full is said on stderr."""
    if (folder := flight.table.get("folder")) is None:
        return
    rank = flight.table["rank"]
    with saying_unwritable(_ended(Path(folder), rank)):
        with replacing(_ended(Path(folder), rank), sync=False) as beside:
            beside.write_bytes(flight.as_bytes())
        _live(Path(folder), rank).unlink(missing_ok=True)


def flights_of(run: Path) -> list[Flight]:
    """What the ranks of a run have recorded so far, in the order of ranks.

    Args:
        run: the run's folder.

    Raises:
        BadInput: no rank has a record there.
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


class LiveRank(NamedTuple):
    """A rank of a run that is running now on this machine, and the ring that it writes to, in its process's memory."""

    rank: int
    memory: Path


def tails_of(run: Path, known: Mapping[LiveRank, Tail]) -> dict[LiveRank, Tail]:
    """The rings of those ranks of a run that are running now on this machine, in the order of ranks.

    Args:
        known: what an earlier call has returned; those of ranks that are still there are taken from it.
    """
    tails = {}
    for rank, path in rank_files(RunFolder(run).flight):
        with _of_others(), contextlib.suppress(OSError):
            if path.suffix != ".live" or (memory := _memory(path)) is None or not memory.is_file():
                continue
            live = LiveRank(rank, memory)
            if (tail := known.get(live)) is None:
                with memory.open("rb") as file:
                    tail = Tail(file.fileno())
            if tail.table.keys() >= FIELDS:
                tails[live] = tail
    return tails


def ranks_are_gone(run: Path) -> bool:
    """Whether a run has begun, and no process of its ranks is there any more, though none has ended in order.

    Of processes on another machine, or in a container of its own, nothing is known: then it is False.
    """
    files = [path for _, path in rank_files(RunFolder(run).flight) if path.suffix == ".live"]
    return bool(files) and all(_is_gone(path) for path in files)


def _is_gone(path: Path) -> bool:
    """Whether the process that the rank's file at `path` names has been here, and has ended."""
    with _of_others(), contextlib.suppress(OSError):
        live = json.loads(path.read_text())
        seen = (live["boot"], live["pids"]) == (boot_id(), pid_namespace())
        return seen and (birth_of(int(live["pid"])) != live["birth"] or state_of(int(live["pid"])) in ("Z", "X"))
    return False


def _told_of_this_process(descriptor: int) -> dict[str, Any]:
    """What others are told of this process and of its ring, for the file `_live`."""
    pid = os.getpid()
    return {
        "pid": pid,
        "descriptor": descriptor,
        "boot": boot_id(),
        "pids": pid_namespace(),
        "birth": birth_of(pid),
    }


def _read_live(path: Path) -> Flight | None:
    """What a running process has recorded; None if it is on another machine or has ended."""
    with _of_others():
        if (memory := _memory(path)) is not None:
            return read_flight(memory)
    return None


def _memory(path: Path) -> Path | None:
    """The ring's memory, as the rank's file at `path` names it; None if that is on another machine."""
    live = json.loads(path.read_text())
    return Path(f"/proc/{int(live['pid'])}/fd/{int(live['descriptor'])}") if live["boot"] == boot_id() else None


def _of_others() -> AbstractContextManager[None]:
    """Suppresses the errors of reading what a `.live` file names: another process may have that pid by now."""
    return contextlib.suppress(BadInput, ValueError, KeyError, TypeError)


def _clear(folder: Path, table: Mapping[str, Any]) -> None:
    """Remove this rank's files of an earlier run; rank 0 also removes those of ranks that no longer exist."""
    flight = RunFolder(folder).flight
    flight.mkdir(parents=True, exist_ok=True)
    for rank, path in rank_files(flight):
        if rank == table["rank"] or (table["rank"] == 0 and rank >= table["world"]):
            path.unlink(missing_ok=True)


def _live(folder: Path, rank: int) -> Path:
    return RunFolder(folder).flight / f"rank-{rank:05}.live"


def _ended(folder: Path, rank: int) -> Path:
    return RunFolder(folder).flight / f"rank-{rank:05}.ended"
