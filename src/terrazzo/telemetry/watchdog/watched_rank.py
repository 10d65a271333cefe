"""A rank's side of its warden: how it describes itself, and how it does what the warden asks.

torchrun, Slurm and `terrazzo run` do not watch the ranks that they start. The first rank of each machine starts a
warden for that, after some seconds: short runs never have one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import platform
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.exchange import gather_json
from terrazzo.exit_codes import STALLED
from terrazzo.hosts import open_listener, own_address
from terrazzo.processes.ending import Ending, start_thread
from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.processes.system import birth_of, boot_id, memory_file
from terrazzo.telemetry.flight.folder import FlightRecorder
from terrazzo.telemetry.flight.recorder import RingRecorder
from terrazzo.telemetry.log.torchrun_report import report_to_torchrun
from terrazzo.telemetry.watchdog.rank_progress import LEFT
from terrazzo.telemetry.watchdog.recording import ASK, threads_memory
from terrazzo.telemetry.watchdog.warden_links import RunMachine, reached_of
from terrazzo.telemetry.watchdog.watchdog import Patience

__all__ = ["END", "SHOW_THREADS", "TASK", "look_after", "task_of"]

TASK = "TERRAZZO_WARDEN"
"""Environment variable of a warden: the descriptor of a file that says which ranks it watches, and how, as JSON. A
variable itself holds 128 KiB, which is less than thousand machines take.
"""

SHOW_THREADS, END, _LEAVE = b"?", b"x", b"-"
"""Written to a rank's pipe: show the stacks of your threads; end, for the reason that follows; stop listening."""

_MODULE = "terrazzo.telemetry.watchdog.warden"
_SOONEST_S = 5.0
_started: list[subprocess.Popen[bytes]] = []
"""Wardens, referenced until this process ends: they end after it."""


def look_after(flight_recorder: FlightRecorder, patience: Patience) -> Callable[[], None] | None:
    """Have a warden on each machine watch the ranks there; wardens report to each other. Collective.

    Returns:
        A function that ends this for the rank, as the end of the flight recorder does. None if there is no warden: a
        single rank needs none, and some systems do not show processes to each other.
    """
    channel = _WardenChannel()
    everyone = gather_json(channel.description(flight_recorder.descriptor))
    machines = list(dict.fromkeys(each["machine"] for each in everyone))
    if len(everyone) == 1 or "" in machines:
        channel.close()
        return None
    rank = flight_recorder.events.table["rank"]
    ranks = [{"rank": rank, **each} for rank, each in enumerate(everyone) if each["machine"] == channel.machine]
    starts = ranks[0]["rank"] == rank
    task, listener = {"ranks": ranks, "patience": patience}, None
    if len(machines) > 1:
        listener = open_listener() if starts else None
        task |= _links_task(everyone, machines, listener)
    start = functools.partial(_start, task, listener) if starts else None
    reach = functools.partial(_reach, task) if listener is not None else None
    soon_s = min(_SOONEST_S, patience.stall_s / 4)
    start_thread("terrazzo-warden", functools.partial(_listen, channel, (reach, start), soon_s), channel.leave)
    return Ending(flight_recorder, functools.partial(_leave, channel, flight_recorder.events))


def _links_task(
    everyone: Sequence[Mapping[str, Any]], machines: Sequence[str], listener: socket.socket | None
) -> dict[str, Any]:
    """Where wardens find each other, and the key by which they know each other. Collective."""
    own = None if listener is None else [own_address(), listener.getsockname()[1], secrets.token_hex(16)]
    listeners = gather_json(own)
    places = []
    for machine in machines:
        ranks = [rank for rank, each in enumerate(everyone) if each["machine"] == machine]
        address, port, _ = listeners[ranks[0]]
        places.append([everyone[ranks[0]]["host"], address, port, ranks])
    return {"places": places, "key": listeners[0][2], "own": machines.index(_machine())}


class _WardenChannel:
    """What a rank opens for its warden: a pipe for commands, and memory for the stacks of its threads."""

    def __init__(self) -> None:
        self.machine, self._lock, self._left = _machine(), threading.Lock(), False
        self.commands, self._command_writer = os.pipe()
        self._threads = threads_memory()
        self._signalled = signal.getsignal(ASK) is signal.SIG_DFL  # a script may use the signal itself
        if self._signalled:
            faulthandler.register(ASK, file=self._threads, all_threads=True, chain=False)

    def description(self, ring: int) -> dict[str, Any]:
        """How another process of this machine finds the rank's descriptors."""
        places = {}
        for name, number in (("ring", ring), ("threads", self._threads), ("commands", self._command_writer)):
            status = os.fstat(number)
            places[name] = [number, status.st_dev, status.st_ino]
        about = {"machine": self.machine, "host": platform.node(), "pid": os.getpid(), "birth": birth_of(os.getpid())}
        return {**about, **places, "signalled": self._signalled}

    def show_threads(self) -> None:
        faulthandler.dump_traceback(self._threads, all_threads=True)

    def leave(self) -> None:
        with self._lock:
            if not self._left:
                self._left = True
                if self._signalled:  # the default action of a signal that comes late would end the process
                    faulthandler.register(ASK, file=_nowhere(), all_threads=False, chain=False)
                os.write(self._command_writer, _LEAVE)

    def close(self) -> None:
        self.leave()
        for number in (self.commands, self._command_writer, self._threads):
            os.close(number)


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _machine() -> str:
    """A name that is the same for processes that see each other; empty if they cannot."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _leave(channel: _WardenChannel, recorder: RingRecorder) -> None:
    recorder.phase(LEFT)
    channel.leave()


def _reach(task: dict[str, Any]) -> None:
    """Note which machines answer now, while all is well: only their silence will mean something later."""
    task["reached"] = list(reached_of([RunMachine(*each) for each in task["places"]], task["own"]))


def _start(task: Mapping[str, Any], listener: socket.socket | None) -> None:
    """Start the warden, in a session of its own, so that it is not ended with this one's."""
    told = memory_file("terrazzo-warden")
    environment = os.environ | {
        TASK: str(told),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command, nothing = [sys.executable, "-P", "-m", _MODULE], subprocess.DEVNULL
    listens = [] if listener is None else [listener.fileno()]
    try:
        _write_all(told, json.dumps({**task, "listener": next(iter(listens), -1)}).encode())
        _started.append(
            subprocess.Popen(
                command,
                stdin=nothing,
                stdout=nothing,
                env=environment,
                start_new_session=True,
                pass_fds=[told, *listens],
            )
        )
    except OSError as error:  # such as no process or memory left
        say_on_stderr(f"Nobody looks whether ranks stand still: {_MODULE} cannot be started ({error.strerror}).")
    os.close(told)
    if listener is not None:
        listener.close()


def task_of(descriptor: int) -> dict[str, Any]:
    """What a warden has been told: the file that `TASK` names."""
    with open(descriptor, encoding="ascii") as file:
        file.seek(0)
        task: dict[str, Any] = json.load(file)
    return task


def _write_all(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)


def _listen(channel: _WardenChannel, begins: Sequence[Callable[[], None] | None], soon_s: float) -> None:
    """Start the warden after `soon_s`, if this rank is the one that does; then obey what comes through the pipe.

    Args:
        begins: what to do at once, and how to start the warden; None for neither.
    """
    at_once, start = begins
    if at_once is not None:
        at_once()
    if start is not None:
        waiting = select.poll()
        waiting.register(channel.commands, select.POLLIN)
        if not waiting.poll(soon_s * 1e3):
            start()
    while (word := os.read(channel.commands, 1)) == SHOW_THREADS:
        channel.show_threads()
    if word == END:
        _end(os.read(channel.commands, 1 << 16).decode())
    channel.close()


def _end(why: str) -> None:
    """End this process at once, whatever it waits for. torchrun gets the reason, for its own report."""
    report_to_torchrun(why)
    os._exit(STALLED)
