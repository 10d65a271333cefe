"""How long the search takes, in one process and on one core: `python -m benchmarks.planner.speed`.

Fails where 1,024 devices take a second or more. The best of three, after one that fills the caches: a command line
pays for those once more, and for importing torch.
"""

from __future__ import annotations

import sys
import time

from terrazzo.planner.choice.fewest import min_gpus
from terrazzo.planner.choice.search import search
from terrazzo.planner.setup.request import Request

LIMIT_S = 1.0
SEARCHES = {
    "llama3-70b, data parallel, 1,024": Request("llama3-70b", 1024, "h100"),
    "llama3-70b, all axes, 1,024": Request("llama3-70b", 1024, "h100", parallel=True, offload=True),
    "llama3-70b, data parallel, 8 to 1,024": Request("llama3-70b", "8..1024", "h100"),
    "qwen3-30b-a3b, all axes, 1,024": Request("qwen3-30b-a3b", 1024, "h100", parallel=True),
}


def main() -> int:
    """Print a line for each search; 1 where one that has a limit exceeds it."""
    slow = 0
    for name, request in SEARCHES.items():
        first_s, found = _timed(request)
        best_s = min(_timed(request)[0] for _ in range(3))
        print(f"{name}: {best_s:.3f} s (first {first_s:.3f} s), {found} candidates")
        slow += best_s >= LIMIT_S
    started = time.perf_counter()
    answer = min_gpus(Request("llama3-70b", None, "h100"))
    print(f"sizing of llama3-70b: {time.perf_counter() - started:.3f} s: {answer}")
    return int(slow > 0)


def _timed(request: Request) -> tuple[float, int]:
    started = time.perf_counter()
    considered = search(request).considered
    return time.perf_counter() - started, considered


if __name__ == "__main__":
    sys.exit(main())
