"""How many processes the kernel has killed for lack of memory while ranks were watched."""

from __future__ import annotations

from terrazzo.processes.system import oom_kills

__all__ = ["MemoryKills"]


class MemoryKills:
    """Counts the kernel's out-of-memory kills from when it is made."""

    def __init__(self) -> None:
        self._before = oom_kills()

    @property
    def count(self) -> int | None:
        """Kills so far; None if the kernel does not tell."""
        now = oom_kills()
        return None if now is None or self._before is None else now - self._before
