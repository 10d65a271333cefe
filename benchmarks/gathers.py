"""Weights and gradients sent in fewer bits over a slow link: how long steps take, and what bounds them.

Two network namespaces of this machine stand for two nodes, as in `benchmarks.network`: of one gloo rank each, and for
`hybrid_shard` of two, so that groups are within a node. All contenders of a plan's ranks live in the same processes and
step in turn, so they share every busy moment.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from terrazzo.engine import WireFormat

CASE = Case(Shape(4, 384, 1024, 32), 1, "little to compute, all weights to move", precision="bf16")
BF16 = tz.Precision.named("bf16")
REDUCED = {
    "fp32": BF16,
    "bf16": replace(BF16, reduce=torch.bfloat16),
    "int8": replace(BF16, quantized_reduce=WireFormat.INT8),
    "int4": replace(BF16, quantized_reduce=WireFormat.INT4),
}
Sent = tuple[str, str, WireFormat | None]
SENT: dict[int, list[Sent]] = {
    1: list(itertools.product(("zero3", "zero2"), REDUCED, (None, WireFormat.INT8))),
    2: [("hybrid_shard", reduced, None) for reduced in REDUCED],
}
"""By ranks of a node: the plan, what gradients are sent in, and what weights are gathered in; None for `compute`."""
LIMIT_S = 500.0


def contender(plan: str, reduced: str, gather: WireFormat | None) -> Contender:
    """One of `SENT`."""
    return Contender(plan, plan == "hybrid_shard", replace(REDUCED[reduced], gather=gather))


def _run_rank(turns: int, per_node: int, report: Path) -> None:
    """Write what each contender's steps took on this rank, in the order of `SENT`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = CASE.model()
    trainees = [Trainee(contender(*sent), CASE, deepcopy(model)) for sent in SENT[per_node]]
    shuffle = random.Random(0)
    for _ in range(1 + turns):
        for trainee in shuffle.sample(trainees, len(trainees)):
            trainee.step()
    report.write_text(json.dumps([each.report() for each in trainees]))
    dist.barrier()
    dist.destroy_process_group()


HEAD = """| plan | gradients in | weights in | step s | × bf16 | link MB | × bf16 | link alone s |
|---|---|---|--:|--:|--:|--:|--:|"""


def rows(per_node: int, ranks: Sequence[Sequence[Mapping[str, Any]]], rate_mbit: int) -> str:
    """Of a Markdown table, from the reports of all ranks: medians over turns, and bytes that one node sends in a step.

    Ratios are to the plan's step in which all is sent in bf16; those of steps within turns.
    """
    places = {sent: place for place, sent in enumerate(SENT[per_node])}
    steps = {
        sent: [max(turn) for turn in zip(*(rank[place]["step_s"] for rank in ranks), strict=True)]
        for sent, place in places.items()
    }
    link = {sent: median(ranks[0][place]["link_bytes"]) for sent, place in places.items()}
    found = []
    for plan, reduced, gather in places:
        sent, plain = (plan, reduced, gather), (plan, "bf16", None)
        cells = [
            f"`{plan}`",
            reduced,
            gather or "bf16",
            f"{median(steps[sent]):.2f}",
            f"{median(a / b for a, b in zip(steps[sent], steps[plain], strict=True)):.2f}",
            f"{link[sent] / 1e6:.1f}",
            f"{link[sent] / link[plain]:.2f}",
            f"{8 * link[sent] / (rate_mbit * 1e6):.2f}",
        ]
        found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found)


def _with_report(words: Sequence[str], report: Path) -> list[str]:
    return [*words, str(report)]


def main() -> None:
    """Print the table; with --report, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate-mbit", type=int, default=100)
    parser.add_argument("--per-node", type=int, choices=SENT, help="those with so many ranks to a node alone")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report is not None:
        _run_rank(arguments.turns, arguments.per_node, arguments.report)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are cleaned up then too
    found = []
    for per_node in [arguments.per_node] if arguments.per_node else SENT:
        words = ["-m", "benchmarks.gathers", "--turns", str(arguments.turns), "--per-node", str(per_node), "--report"]
        with two_nodes(arguments.rate_mbit, delay_ms=0.5) as nodes:
            reports = run_ranks(nodes, per_node, functools.partial(_with_report, words), LIMIT_S)
        found.append(rows(per_node, [json.loads(report) for report in reports], arguments.rate_mbit))
    print(f"{CASE.describe()}. Link: {nodes.shaping}.\n")
    print(HEAD, *found, sep="\n")


if __name__ == "__main__":
    main()
