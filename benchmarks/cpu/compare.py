"""Contenders take turns: one case, one machine, one run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.gang import Gang
from benchmarks.cpu.outcome import Outcome
from benchmarks.cpu.rank import Steps

MEMORY_STEPS = 2
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Effort:
    """How much is run: turns of each contender, timed steps per turn, untimed steps before them, and by how many."""

    rounds: int = 5
    steps: int = 1
    warmup: int = 1
    ranks: int = 2
    seed: int = 0


def take_turns(case: str, group: Sequence[str], effort: Effort, number: int = 0) -> list[Outcome]:
    """Start the contenders of one group and let them step in turn, in an order shuffled for each round.

    Args:
        number: of the group, for contenders that are in several.
    """
    shuffle = random.Random(effort.seed)
    turns: dict[str, list[list[Steps]]] = {name: [] for name in group}
    sent_bytes: dict[str, list[float]] = {name: [] for name in group}
    with ExitStack() as stack:
        gangs = {}
        for name in shuffle.sample(list(group), len(group)):
            progress(f"{case}: starting {name}")
            gangs[name] = stack.enter_context(Gang(case, name, effort.ranks, effort.seed))
            gangs[name].steps(effort.warmup)
        for round_number in range(1, effort.rounds + 1):
            for name in shuffle.sample(list(group), len(group)):
                before = _sent_bytes(gangs[name])
                turns[name].append(gangs[name].steps(effort.steps))
                sent_bytes[name].append((_sent_bytes(gangs[name]) - before) / effort.ranks / effort.steps)
                step_ms = 1e3 * max(rank.wall_s[-1] for rank in turns[name][-1])
                progress(f"{case}: round {round_number} of {effort.rounds}, {name}: {step_ms:.0f} ms")
        overall = {name: gang.overall_peak_bytes() for name, gang in gangs.items()}
        training = {name: gang.training_peak_bytes(MEMORY_STEPS) for name, gang in gangs.items()}
        startup = {name: import_s(CONTENDERS[name].library) + gang.startup_s() for name, gang in gangs.items()}
        wire_s_per_byte = next((gangs[n].wire_s(1 << 30) / (1 << 30) for n in group if n == "alone"), None)
    sent = {name: median(found) for name, found in sent_bytes.items()}
    return [
        Outcome(name, number, turns[name], training[name], overall[name], startup[name], sent[name], wire_s_per_byte)
        for name in group
    ]


@cache
def import_s(library: str) -> float:
    """Seconds to import a library in a fresh interpreter that has what every contender loads."""
    library = {"terrazzo": "terrazzo.engine"}.get(library, library)  # by itself it imports what is asked for
    code = (
        "import importlib, time, torch, torch.distributed, torch._dynamo; begun = time.perf_counter();"
        f"importlib.import_module({library!r}); print(time.perf_counter() - begun)"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def progress(text: str) -> None:
    """A line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def _sent_bytes(gang: Gang) -> int:
    """By all ranks so far: their own count, or else what has gone through the loopback interface."""
    counts = gang.sent_bytes()
    return sum(count for count in counts if count) if counts[0] is not None else int(LOOPBACK.read_text())
