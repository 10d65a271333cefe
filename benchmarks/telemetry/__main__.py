"""What telemetry costs a step of `terrazzo train`: pairs of the same training with and without it, one after the other.

    python -m benchmarks.telemetry [--pairs 10] [--steps 60]

Two ranks on this machine's processors. Of each training the median step counts, by the clock and by processor time of
both ranks; of the pairs the median of their ratios, with its quartiles. Losses have to be the same to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

WARM = 11
"""First steps, which do not count: up to the first record."""


class _Ran(NamedTuple):
    """Medians over steps: seconds, and processor seconds of both ranks; and all losses."""

    step_s: float
    processor_s: float
    losses: list[float]


def _train(mode: str, config: Path, steps: int) -> _Ran:
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        words = [sys.executable, "-m", "benchmarks.telemetry.rank", mode, str(times), str(config)]
        words += [f"train.steps={steps}", f"log.folder={folder}/run"]
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
            raise SystemExit(f"A rank of the training with telemetry {mode} failed.")
        moments = [json.loads(Path(f"{times}.{rank}").read_text())[WARM - steps :] for rank in (0, 1)]
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    apart = [[(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(own)] for own in moments]
    return _Ran(
        median(clock for clock, _ in apart[0]),
        median(one[1] + other[1] for one, other in zip(*apart, strict=True)),
        [line["loss"] for line in lines if line["kind"] == "train"],
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    config = Path(__file__).with_name("train.yaml")
    ratios: list[tuple[float, float]] = []
    for pair in range(asked.pairs):
        order = ("on", "off") if pair % 2 else ("off", "on")  # what drifts meanwhile falls on both
        ran = {mode: _train(mode, config, asked.steps) for mode in order}
        on, off = ran["on"], ran["off"]
        if on.losses != off.losses:
            raise SystemExit(f"Losses differ: {on.losses} with telemetry, {off.losses} without.")
        ratios.append((on.step_s / off.step_s - 1, on.processor_s / off.processor_s - 1))
        said = f"{on.step_s * 1e3:.2f} and {off.step_s * 1e3:.2f} ms, of processors "
        print(f"pair {pair + 1}: {said}{on.processor_s * 1e3:.2f} and {off.processor_s * 1e3:.2f} ms", flush=True)
    for name, column in (("step by the clock", 0), ("processor time", 1)):
        values = [ratio[column] for ratio in ratios]
        low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
        print(f"{name}: {middle:+.2%} with telemetry, quartiles {low:+.2%} to {high:+.2%}; losses the same to the bit")


if __name__ == "__main__":
    _main()
