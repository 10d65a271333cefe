"""Runs that nothing is wrong with, and how often the watchdog says that something is.

    python -m benchmarks.telemetry.clean [--runs 100] [--slow-s 3]

Each is a training of two ranks that builds its cache of tokens, evaluates, and saves twice to a drive on which a save
takes `--slow-s` at least, with `launch.stall_s` a third of that: so a save of a minute stands to the twenty seconds of
a real run. An alarm is any word on standard error, or an exit code; a save that was not slow counts as a failure, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_STEPS = 12
_SAVES = 2


def _run(slow_s: float) -> tuple[str, float]:
    """What is wrong with one run, empty for nothing; and seconds that its saves took."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "terrazzo", "train", str(Path(__file__).with_name("train.yaml"))]
        words += [
            f"log.folder={folder}/run",
            f"data.cache={folder}/tokens",
            f"launch.stall_s={slow_s / 3}",
            "log.every=1",
        ]
        words += ["launch.ranks=2", f"train.steps={_STEPS}", "train.eval_every=6", "train.eval_batches=4"]
        words += [f"checkpoint.every={_STEPS // _SAVES}", "model.dim=32", "model.layers=2", "batch.sequence_length=32"]
        path = os.pathsep.join([str(Path(__file__).with_name("slow_disk")), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "TERRAZZO_SLOW_S": str(slow_s), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:
            return f"exit code {done.returncode}: {done.stderr.strip()}", 0.0
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    saved_s = sum(line["phase_s"]["save"] * line["steps"] for line in lines if line["kind"] == "step")
    return "" if saved_s >= _SAVES * slow_s else f"its saves took {saved_s:.1f} s alone", saved_s


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--slow-s", type=float, default=3.0)
    asked = parser.parse_args()
    wrong = 0
    for number in range(1, asked.runs + 1):
        why, saved_s = _run(asked.slow_s)
        wrong += bool(why)
        print(f"run {number}: {why or 'nothing said'}, {saved_s:.1f} s of saves; {wrong} wrong so far", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    _main()
