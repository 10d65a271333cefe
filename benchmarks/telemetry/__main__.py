"""What telemetry costs a step of `terrazzo train`, in microseconds.

    python -m benchmarks.telemetry [--steps 300] [KEY=VALUE...]

Three trainings of two ranks on this machine's processors. In the first, half of the steps have no telemetry, so that
what else the machine does falls on both: what counts is the difference of the medians of processor time, with its
standard error from resampled steps. In the second calls are timed: beside the arithmetic of a step caches are cold, and
a call takes ten times as long as in a loop. What a call of nothing takes is taken off. The third has no telemetry, and
its losses have to be the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

_KEPT = 0.95
"""Of all calls, the fastest so many count: the system may take the processor away from any."""


class _Ran(NamedTuple):
    """What each rank has written, and all losses."""

    ranks: list[dict[str, Any]]
    losses: list[float]


def _train(mode: str, steps: int, more: Sequence[str]) -> _Ran:
    config = Path(__file__).with_name("train.yaml")
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        words = [sys.executable, "-m", "benchmarks.telemetry.rank", mode, str(times), str(config)]
        words += [f"train.steps={steps}", f"log.folder={folder}/run", *more]
        with socket.socket() as found:
            found.bind(("localhost", 0))
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
        shared |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                words, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL
            )
            for rank in ("0", "1")
        ]
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"A rank of the training '{mode}' failed.")
        written = [json.loads(Path(f"{times}.{rank}").read_text()) for rank in (0, 1)]
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return _Ran(written, [line["loss"] for line in lines if line["kind"] == "train"])


def _difference(on: Sequence[float], off: Sequence[float]) -> tuple[float, float]:
    """Of the medians, in µs, with its standard error."""
    draw = random.Random(0)
    apart = [median(draw.choices(on, k=len(on))) - median(draw.choices(off, k=len(off))) for _ in range(400)]
    return (median(on) - median(off)) * 1e6, stdev(apart) * 1e6


def _say_halves(ran: _Ran) -> None:
    for rank, written in enumerate(ran.ranks):
        for column, name in enumerate(("processor time", "of the main thread")):
            on, off = ([row[column] for row in written["rows"] if row[2] is which] for which in (True, False))
            found, error = _difference(on, off)
            share = f"{found / median(off) / 1e4:+.2f} % of {median(off) * 1e3:.1f} ms"
            print(f"rank {rank}, {name}: {found:+.0f} ± {error:.0f} µs a step, {share}", flush=True)


def _mean_us(took: Sequence[int]) -> float:
    return mean(sorted(took)[: max(1, int(len(took) * _KEPT))]) / 1e3


def _say_parts(ran: _Ran) -> None:
    written = ran.ranks[0]
    steps, whole, took = len(written["rows"]), 0.0, written["took"]
    nothing = _mean_us(took.pop("nothing"))
    for name, each in took.items():
        if each:
            a_call, calls = _mean_us(each) - nothing, 2 * len(each) / steps
            whole += a_call * calls
            print(f"  {name:<24}{calls:6.1f} a step × {a_call:7.1f} µs = {a_call * calls:6.1f} µs")
    print(f"  all, rank 0, by the clock, less a call of nothing ({nothing:.1f} µs) each: {whole:.0f} µs a step")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="of the training, beside train.yaml")
    asked = parser.parse_args()
    _say_halves(_train("half", asked.steps, asked.more))
    short = max(60, asked.steps // 3)
    parts = _train("parts", short, asked.more)
    _say_parts(parts)
    off = _train("off", short, asked.more)
    if off.losses != parts.losses:
        raise SystemExit(f"Losses differ: {parts.losses} with telemetry, {off.losses} without.")
    print(f"losses of {short} steps the same to the bit without telemetry")


if __name__ == "__main__":
    _main()
