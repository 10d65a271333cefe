"""Weights gathered in 8 bits over a slow link: how long steps take with and without, and what bounds them.

Two network namespaces of this machine stand for two nodes of one gloo rank each, as in `benchmarks.network`. All
contenders live in the same two processes and step in turn, so they share every busy moment.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import terrazzo as tz
from benchmarks.cpu.cases import Case
from benchmarks.cpu.models import Shape
from benchmarks.namespaces import run_ranks, two_nodes
from benchmarks.network import Contender, Trainee
from terrazzo.engine import WireFormat, engine_of

CASE = Case(Shape(4, 384, 1024, 32), 1, "little to compute, all weights to move", precision="bf16")
BF16 = tz.Precision.named("bf16")
REDUCED = {"gradients fp32": BF16, "gradients bf16": replace(BF16, reduce=torch.bfloat16)}
CONTENDERS = {
    (plan, reduced, gather): Contender(plan, two_axes=False, precision=replace(precision, gather=gather))
    for plan in ("zero3", "zero2")
    for reduced, precision in REDUCED.items()
    for gather in (None, WireFormat.INT8)
}
"""By plan, what gradients are summed in, and what weights are gathered in; None for `compute`."""
LIMIT_S = 270.0


def _run_rank(turns: int, report: Path) -> None:
    """Write what each contender's steps took on this rank, in the order of `CONTENDERS`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = CASE.model()
    trainees = [Trainee(contender, CASE, deepcopy(model)) for contender in CONTENDERS.values()]
    shuffle = random.Random(0)
    for _ in range(1 + turns):
        for trainee in shuffle.sample(trainees, len(trainees)):
            trainee.step()
    promised = [engine_of(trainee.model).promise.traffic().bytes for trainee in trainees]
    found = [each.report() | {"promised": dict(sent)} for each, sent in zip(trainees, promised, strict=True)]
    report.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(ranks: Sequence[Sequence[Mapping[str, Any]]], rate_mbit: int) -> str:
    """As Markdown, from the reports of both ranks: medians over turns, and bytes that one node sends in a step."""
    rows = [
        "| plan | gradients in | weights in | step s | × without | link MB | weights' share | link alone s |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    steps = {
        key: [max(turn) for turn in zip(*(rank[place]["step_s"] for rank in ranks), strict=True)]
        for place, key in enumerate(CONTENDERS)
    }
    for place, (plan, reduced, gather) in enumerate(CONTENDERS):
        own, plain = steps[plan, reduced, gather], steps[plan, reduced, None]
        sent, promised = median(ranks[0][place]["link_bytes"]), ranks[0][place]["promised"]
        cells = [
            f"`{plan}`",
            reduced.removeprefix("gradients "),
            gather or "bf16",
            f"{median(own):.2f}",
            f"{median(a / b for a, b in zip(own, plain, strict=True)):.2f}",
            f"{sent / 1e6:.1f}",
            f"{promised['all_gather'] / sum(promised.values()):.0%}",
            f"{8 * sent / (rate_mbit * 1e6):.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table; with --report, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate-mbit", type=int, default=100)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report is not None:
        _run_rank(arguments.turns, arguments.report)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are cleaned up then too
    with two_nodes(arguments.rate_mbit, delay_ms=0.5) as nodes:
        words = ["-m", "benchmarks.gathers", "--turns", str(arguments.turns), "--report"]
        reports = run_ranks(nodes, 1, lambda report: [*words, str(report)], LIMIT_S)
    print(f"{CASE.describe()}. Link: {nodes.shaping}.\n")
    print(table([json.loads(report) for report in reports], arguments.rate_mbit))


if __name__ == "__main__":
    main()
