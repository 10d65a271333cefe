"""What a run promises of memory by closed formulas, in the place of its own operators traced.

One micro-batch traced, at the end of each run, is half of what a small run computes. Processes that tests start leave
it out, but where `TRACED` is in their environment.
"""

from __future__ import annotations

import os
import sys

__all__ = ["PLANNED", "TRACED", "leave_out_traces"]

PLANNED = "terrazzo.train.planning.run_estimate"
"""The module; a function of this name hides it."""
TRACED = "TERRAZZO_TESTS_TRACED"


def leave_out_traces() -> None:
    """In this process, from now on, where it has imported what makes promises."""
    if (planned := sys.modules.get(PLANNED)) is not None and not os.environ.get(TRACED):
        planned.traced_memory = lambda config, setup: None  # type: ignore[attr-defined]
