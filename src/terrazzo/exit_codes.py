"""How processes of this package end: `docs/reference/exit-codes.md` says what to do about each."""

from __future__ import annotations

__all__ = ["BAD_INPUT", "CORRUPTED", "DIVERGED", "FAILED", "INTERRUPTED", "PREEMPTED", "STALLED"]

FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL: asked to stop, saved, start again to continue
STALLED = 81  # ranks stood still, and were ended
CORRUPTED = 82  # memory or a drive has changed what was written there, or a rank computes wrongly
DIVERGED = 83  # the numbers left the range that training recovers from
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
