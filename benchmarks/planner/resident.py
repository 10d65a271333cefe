"""`python -m benchmarks.planner.resident`: small runs on CPUs, their peak resident memory against the bound.

Configurations are random, from a seed: sizes of the decoder, rows, checkpointing, optimizers, precisions, plans. Each
run is `terrazzo train` in fresh processes; what a rank had resident at most (`VmHWM`) is held against what the planner
promises it will take at most.
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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.config import Config, config_from_dict
from terrazzo.errors import BadInput

__all__ = ["Measured", "configuration", "measure", "table"]

MIB = 2**20
STEPS, SMALL = 3, 30
MOST_FLOPS = 4e10
"""The most FLOPs of a step on one rank, so that a run takes seconds."""

_RUN = "import sys, pathlib; from terrazzo.train.trainer_rank import *; train_as_rank(pathlib.Path(sys.argv[1]), [])"
LOOK_S = 0.01
"""Between looks at a rank's peak, which only grows."""


@dataclass(frozen=True)
class Measured:
    """One run: bytes that were promised of a rank, expected and at most, and the most that one had resident."""

    row: int
    what: str
    expected: float
    upper: float
    resident: float


def configuration(row: int, seed: int = 0) -> dict[str, Any]:
    """The `row`-th random configuration; from `SMALL` on they have many parameters and few tokens."""
    draw, small = random.Random(f"{seed}/{row}"), row < SMALL
    while True:
        heads = draw.choice((2, 4, 8) if small else (8,))
        dim = heads * draw.choice((16, 32, 64) if small else (64, 96, 128))
        model = {
            "dim": dim,
            "layers": draw.randint(1, 10) if small else draw.randint(4, 24),
            "heads": heads,
            "vocab_size": draw.choice((512, 4096, 16384, 50304)),
        }
        model |= {"kv_heads": draw.choice((heads, heads // 2)), "tie_embeddings": draw.random() < 0.5}
        sequence, micro_batch = draw.choice((64, 128, 256, 512)), draw.choice((1, 2, 4, 8) if small else (1,))
        numel = 12 * dim * dim * model["layers"] + dim * model["vocab_size"]
        if 6 * numel * sequence * micro_batch < MOST_FLOPS:
            break
    ranks, parts = draw.choice((1, 1, 1, 2)), draw.choice((1, 1, 2))
    optimizer = draw.choice(({"name": "AdamW"}, {"name": "AdamW"}, {"name": "SGD"}, {"name": "Lion"}, {"name": "Muon"}))
    return {
        "model": model,
        "data": {"max_bytes": 1_000_000},
        "plan": {"name": draw.choice(("zero0", "zero1", "zero2", "zero3"))},
        "precision": {"name": draw.choice(("fp32", "fp32", "bf16"))},
        "batch": {"global_batch": ranks * parts * micro_batch, "micro_batch": micro_batch, "sequence_length": sequence},
        "optimizer": optimizer,
        "train": {
            "steps": STEPS,
            "activation_checkpointing": draw.choice(("none", "none", "selective", "full", "every_2")),
            "eval_batches": 1,
            "sample_tokens": 4,
        },
        "launch": {"ranks": ranks, "device": "cpu"},
    }


def measure(row: int, seed: int = 0) -> Measured:
    """Plan and run one configuration."""
    from terrazzo.train.planning.run_estimate import estimate_run

    document = configuration(row, seed)
    ranks = document["launch"]["ranks"]
    room = estimate_run(config_from_dict(document), ranks).memory.rooms[0]
    with tempfile.TemporaryDirectory(prefix="terrazzo-resident-") as folder:
        document["log"] = {"folder": f"{folder}/run"}
        document["checkpoint"] = {"folder": f"{folder}/checkpoints"}
        path = Path(folder, "train.json")
        path.write_text(json.dumps(document))
        resident = max(_run(path, ranks))
    return Measured(row, _what(config_from_dict(document)), room.expected, room.upper, resident)


def _run(path: Path, ranks: int) -> list[int]:
    """Peak resident bytes of each rank."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RUN, str(path)],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    peaks = [0] * ranks
    while any(rank.poll() is None for rank in started):
        peaks = [max(peak, _peak_bytes(rank.pid)) for peak, rank in zip(peaks, started, strict=True)]
        time.sleep(LOOK_S)
    for rank in started:
        _, said = rank.communicate()
        if rank.returncode:
            raise RuntimeError(said[-2000:])
    return peaks


def _peak_bytes(process: int) -> int:
    """`VmHWM`; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _what(config: Config) -> str:
    model, batch = config.model, config.batch
    return (
        f"{model.layers} x {model.dim}, {model.vocab_size} words{', tied' if model.tie_embeddings else ''}; "
        f"{batch.micro_batch} x {batch.sequence_length} of {batch.global_batch}; {config.plan.name} on "
        f"{config.launch.ranks}, {config.precision.name}, {config.optimizer.name}, "
        f"{config.train.activation_checkpointing}"
    )


def table(found: Sequence[Measured]) -> str:
    """The table in Markdown, what comes nearest its bound first."""
    lines = ["| row | run | expected MiB | at most | resident | of the bound |", "|--:|---|--:|--:|--:|--:|"]
    for each in sorted(found, key=lambda each: each.upper / each.resident):
        amounts = " | ".join(f"{value / MIB:,.0f}" for value in (each.expected, each.upper, each.resident))
        lines.append(f"| {each.row} | {each.what} | {amounts} | {each.resident / each.upper:.0%} |")
    above = sum(each.resident > each.upper for each in found)
    return "\n".join([*lines, "", f"{above} of {len(found)} runs had more resident than their bound."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="0:30", help="which of the random configurations; default 0:30")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    first, last = map(int, asked.rows.split(":"))
    found = []
    for row in range(first, last):
        try:
            found.append(measure(row, asked.seed))
        except (BadInput, RuntimeError) as error:  # which is no word about memory
            print(f"row {row} did not run: {error}", file=sys.stderr)
            continue
        print(table(found[-1:]).splitlines()[2], file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
