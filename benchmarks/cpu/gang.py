"""The processes of one contender, kept alive and idle between its turns.

Each contender has processes of its own, so that its peak memory and the state of its allocator are its own.
Several live at once, so that their steps can alternate and a busy moment of the machine hits them alike.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.cpu.rank import Start, Steps, Trainee

T = TypeVar("T")
_trainee: Trainee  # in a rank's process, set by its first call


class Gang:
    """All ranks of one contender."""

    def __init__(self, case: str, contender: str, ranks: int, seed: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="terrazzo-bench-")
        self._ranks = [ProcessPoolExecutor(1, mp_context=spawn) for _ in range(ranks)]
        store = os.path.join(self._folder.name, "store")
        starts = [Start(case, contender, seed, rank, ranks, store) for rank in range(ranks)]
        self._all([executor.submit(_begin, start) for executor, start in zip(self._ranks, starts, strict=True)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in self._ranks:
            executor.shutdown(wait=error is None, cancel_futures=True)
        self._folder.cleanup()

    def steps(self, count: int) -> list[Steps]:
        """`count` training steps; one entry per rank."""
        return self._call(Trainee.steps, count)

    def startup_s(self) -> float:
        """Of the slowest rank."""
        return max(self._call(Trainee.startup_s))

    def sent_bytes(self) -> list[int | None]:
        """So far, rank by rank, where the contender counts it."""
        return self._call(Trainee.sent_bytes)

    def wire_s(self, count_bytes: int) -> float:
        """Of the slowest rank."""
        return max(self._call(Trainee.wire_s, count_bytes))

    def overall_peak_bytes(self) -> int:
        """Of the rank that needed most."""
        return max(self._call(Trainee.overall_peak_bytes))

    def training_peak_bytes(self, count: int) -> int:
        """Of the rank that needed most, over `count` steps."""
        return max(self._call(Trainee.training_peak_bytes, count))

    def _call(self, method: Callable[..., T], *arguments: Any) -> list[T]:
        return self._all([executor.submit(_turn, method, *arguments) for executor in self._ranks])

    def _all(self, futures: list[Any]) -> list[Any]:
        """Results in rank order, or the first exception without waiting for ranks that it leaves stuck."""
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]


def _begin(start: Start) -> None:
    global _trainee
    _trainee = Trainee(start)


def _turn(method: Callable[..., T], *arguments: Any) -> T:
    return method(_trainee, *arguments)
