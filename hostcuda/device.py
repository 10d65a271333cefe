"""This process's device: starting it, and what it has noticed."""

from __future__ import annotations

import threading

from hostcuda import surface, threads, virtual
from hostcuda.library import CALLBACK, native
from hostcuda.report import FAULTS, Finding, Report, report
from hostcuda.threads import Told, Watching, tell

__all__ = ["FAULTS", "Finding", "Report", "Told", "Watching", "report", "start", "tell", "virtual"]

_callback = CALLBACK(report.note)


def start(home: int = 0, devices: int = 1, frames: str = "", watched: tuple[type[threading.Thread], ...] = ()) -> None:
    """Give this process its device, after `hostcuda.load()`. The calling thread counts as the main one.

    Args:
        home: the index of this rank's device. Whatever is done on another one is reported as "foreign".
        devices: how many there are, at most 16.
        frames: part of the path of files whose frames findings name.
        watched: classes of threads that are `Watching` from their start to their end.
    """
    report.frames = frames
    threads.WATCHED[:] = watched
    native.start(_callback, home, devices)
    surface.set_device_count(devices)
    native.set_device(home)
