"""Contenders take turns in random order, so that a busy moment of the machine hits them alike."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Turns = dict[str, list[float]]
"""Seconds by contender, one entry per round."""

QUIET = 0.15
PATIENCE = 3


class Others:
    """CPU time that other processes take from the machine meanwhile (Linux: man 5 proc_stat).

    Args:
        total: adds a number up over all processes of this benchmark.

    Attributes:
        kept: cores that others used in each round that counts.
    """

    def __init__(self, total: Callable[[float], float] = lambda own: own) -> None:
        self._total, self.kept = total, list[float]()
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._begun, self._busy_s, self._own_s = time.perf_counter(), _busy_s(), _own_s()

    def cores(self) -> float:
        """Used on average since the restart; the same on all ranks."""
        ranks = self._total(1.0)
        busy_s = self._total(_busy_s() - self._busy_s) / ranks
        own_s = self._total(_own_s() - self._own_s)
        return (busy_s - own_s) * ranks / self._total(time.perf_counter() - self._begun)


def _busy_s() -> float:
    """Of all processors since the machine started, with what the host took from it: user, nice, system, irqs, steal."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Of this process, its threads and the children it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def take_turns(acts: Mapping[str, Callable[[], float]], rounds: int, others: Others | None = None) -> Turns:
    """What each act returns in `rounds` rounds, after one that does not count.

    Rounds in which other processes used more than `QUIET` cores are repeated, up to `PATIENCE` times as many in all,
    and the quietest are kept.
    """
    shuffle, others = random.Random(0), others or Others()
    found: list[tuple[float, dict[str, float]]] = []
    for number in range(1 + PATIENCE * rounds):
        others.restart()
        taken = {name: acts[name]() for name in shuffle.sample(list(acts), len(acts))}
        if number:
            found.append((others.cores(), taken))
        if sum(cores <= QUIET for cores, _ in found) == rounds:
            break
    quietest = sorted(found, key=lambda entry: entry[0])[:rounds]
    others.kept += [cores for cores, _ in quietest]
    return {name: [taken[name] for _, taken in quietest] for name in acts}


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """Median over the rounds of one over the other."""
    return median(a / b for a, b in zip(own, other, strict=True))


def in_fresh_process(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The result of a call in a process of its own, which gives all memory back; what it prints goes to stderr."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin) as one:
        return one.submit(work, *arguments, **named).result()


def _begin() -> None:
    os.dup2(2, 1)
    prepare_deepspeed()


def prepare_deepspeed() -> None:
    """Say that there is no accelerator, and where the ninja is that builds its kernels."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def attempt(missing: dict[str, str], name: str, build: Callable[[], T]) -> T | None:
    """What `build` returns, or None and a note of why a peer does not run here: that breaks no benchmark."""
    try:
        return build()
    except Exception as error:
        said = str(error).strip().splitlines()
        missing[name] = f"{type(error).__name__}: {said[-1]}" if said else type(error).__name__
        return None
