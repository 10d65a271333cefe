"""Replicas over a slow link that train by themselves: steps beside those that sum gradients, and the loss.

Two network namespaces of this machine stand for two nodes of one gloo rank each, as in `benchmarks.gathers`. Each way
to train runs in turn, for as many steps, on the same batches of a text of numbers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from benchmarks.namespaces import run_ranks, two_nodes
from terrazzo.engine import engine_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig

CONFIG = DecoderConfig(128, 256, 3, 8, 4, 704, 64)
ROWS, LENGTH, LR = 8, 64, 3e-3
WAYS: dict[str, tz.DiLoCo | None] = {
    "alone": tz.DiLoCo(10**6),
    "gradients summed": None,
    "DiLoCo 10, fp32": tz.DiLoCo(10),
    "DiLoCo 10, int8": tz.DiLoCo(10, traffic="int8"),
    "DiLoCo 40, int8": tz.DiLoCo(40, traffic="int8"),
}
"""How weights are joined: never, in every step, or at the ends of rounds."""
LIMIT_S = 900.0


def _text(seed: int) -> Tensor:
    """[ROWS, LENGTH] of `the number n follows n - 1` from random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 5000, (ROWS,), generator=generator).tolist()
    lines = ["".join(f"the number {n + i} follows {n + i - 1}\n" for i in range(4))[: LENGTH + 1] for n in starts]
    return torch.tensor([list(line.encode()) for line in lines])


def _loss(model: Any, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _run_way(settings: tz.DiLoCo | None, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    mesh = tz.mesh(dp_replicate=2, device="cpu")
    make = lambda parameters: torch.optim.AdamW(parameters, lr=LR)  # noqa: E731
    model, optimizer = tz.shard(model, make, "zero0", mesh=mesh, units=[Block], diloco=settings)
    times, sent = [], 0
    for step in range(steps):
        dist.barrier() if step == 0 else None
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20) * max(0.1, 1 - step / steps)
        _loss(model, _text(2 * step + dist.get_rank())).backward()
        tz.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).settle()
        times.append(time.perf_counter() - start)
        sent += sum(engine_of(model).traffic.bytes.values())
        engine_of(model).traffic.reset()
    model.eval()
    with torch.no_grad():
        held_out = sum(_loss(model, _text(10**6 + part)).item() for part in range(16)) / 16
    return {
        "times": times,
        "loss": held_out,
        "sent": sent / steps,
        "numel": sum(unit.numel for unit in engine_of(model).units),
    }


def _run_rank(steps: int, names: Sequence[str], report: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report.write_text(json.dumps({name: _run_way(WAYS[name], steps) for name in names}))
    dist.barrier()
    dist.destroy_process_group()


def table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown, from the reports of both ranks."""
    rows = ["| | tokens/s | of alone | MB sent a step | held-out loss |", "|---|--:|--:|--:|--:|"]
    rate = {
        name: ROWS * LENGTH * 2 * len(found["times"]) / max(sum(rank[name]["times"]) for rank in ranks)
        for name, found in ranks[0].items()
    }
    for name, found in ranks[0].items():
        loss = median(rank[name]["loss"] for rank in ranks)
        cells = [
            name,
            f"{rate[name]:,.0f}",
            f"{rate[name] / rate['alone']:.2f}",
            f"{found['sent'] / 1e6:.3f}",
            f"{loss:.4f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Print the table; with --report, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate-mbit", type=int, default=20)
    parser.add_argument("--delay-ms", type=float, default=40.0, help="each way")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report is not None:
        _run_rank(arguments.steps, arguments.ways, arguments.report)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are cleaned up then too
    words = ["-m", "benchmarks.rounds", "--steps", str(arguments.steps), "--ways", *arguments.ways, "--report"]
    with two_nodes(arguments.rate_mbit, arguments.delay_ms) as nodes:
        reports = [json.loads(each) for each in run_ranks(nodes, 1, lambda path: [*words, str(path)], LIMIT_S)]
    numel = next(iter(reports[0].values()))["numel"]
    print(
        f"{numel / 1e6:.1f} M parameters, zero0, one rank a node, {ROWS} x {LENGTH} tokens each.",
        f"Link: {nodes.shaping}.\n",
    )
    print(table(reports))


if __name__ == "__main__":
    main()
