"""Virtual time: what a program would take if kernels, copies and collectives took what these speeds say."""

from __future__ import annotations

from hostcuda.collectives import LINKS, Links
from hostcuda.library import native

__all__ = ["LINKS", "Links", "busy_s", "now_s", "set_speeds"]


def set_speeds(flops: float = 4e14, memory: float = 2e12, pcie: float = 2.5e10, launch_s: float = 0.0) -> None:
    """Speeds from now on. Those of collectives are `LINKS`.

    Args:
        flops: FLOP per second of matrix products.
        memory: bytes per second of every other kernel.
        pcie: bytes per second of copies from and to the host.
        launch_s: seconds that a launch costs the host.
    """
    native.set_speeds(flops, memory, pcie, launch_s)


def now_s() -> float:
    """Seconds by which all is over that this thread has done or waited for."""
    return float(native.host_time_s())


def busy_s(device: int, stream_id: int = 0) -> float:
    """Seconds of work that a stream has been given so far."""
    return float(native.busy_s(device, stream_id))
