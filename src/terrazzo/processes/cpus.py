"""The CPUs that this process may run on. Nothing here imports torch."""

from __future__ import annotations

import os

__all__ = ["allowed_cpus"]


def allowed_cpus() -> frozenset[int]:
    """CPUs that this thread may run on: its affinity mask, within its cpuset; all where the system has no masks."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
