"""Replicas over a slow link that train by themselves (DiLoCo): tokens per second beside nodes that never agree.

Two network namespaces of this machine stand for two nodes of one gloo rank each, as in `benchmarks.gathers`, with the
model and the batches of `examples/quickstart.yaml`. The ways to train take turns, each of whole rounds, so that what
else the machine does is in all of them; what is printed are medians over turns, of the slower node. On a machine with
other work steps take longer and links do not, so that rates beside `alone` come out too good: there, look at "idle",
which is computed from the CPU time of a step alone, and from how long the link was waited for with both nodes there.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import terrazzo as tz
from benchmarks.namespaces import run_ranks, two_nodes
from terrazzo.engine import engine_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig

CONFIG = DecoderConfig(vocab_size=257, dim=256, layers=4, heads=4, kv_heads=2, ffn_dim=704, max_sequence_length=128)
ROWS, LENGTH = 8, 128


class Way(NamedTuple):
    """How weights are joined, and the steps of a turn."""

    diloco: tz.DiLoCo | None
    steps: int


WAYS = {
    "alone": Way(tz.DiLoCo(10**6), 25),
    "gradients summed": Way(None, 2),
    "rounds of 25, fp32": Way(tz.DiLoCo(25), 25),
    **{f"rounds of {every}, int8": Way(tz.DiLoCo(every, traffic="int8"), every) for every in (10, 25, 50, 100)},
    **{
        f"fragments every 10, meeting every {round_steps}, int8": Way(
            tz.DiLoCo(10, traffic="int8", fragments=5, delay=2, meet_every=round_steps), round_steps
        )
        for round_steps in (50, 100)
    },
}
LIMIT_S = 3600.0


class Training:
    """A model that is trained in one of the ways, a turn at a time."""

    def __init__(self, way: Way) -> None:
        torch.manual_seed(0)
        self.way, mesh = way, tz.mesh(dp_replicate=2, device="cpu")
        make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # noqa: E731
        self.model, self.optimizer = tz.shard(
            Decoder(CONFIG), make, "zero3", mesh=mesh, units=[Block], diloco=way.diloco
        )
        self.engine = engine_of(self.model)

    def turn(self) -> dict[str, Any]:
        """Of each step its seconds, and those of CPU; how long the link was waited for, and the bytes that are sent."""
        dist.barrier()
        self.engine.traffic.reset()
        seconds, cpu = [], []
        for _ in range(self.way.steps):
            start, start_cpu = time.perf_counter(), time.process_time()
            tokens = torch.randint(CONFIG.vocab_size, (ROWS, LENGTH + 1))
            F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            tz.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()  # the last of a round with an outer step
            self.optimizer.zero_grad()
            self.engine.settle()
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        sums = [times for (_, kind), times in self.engine.traffic.times.items() if kind != "control"]
        waited = sum(times.exposed_s - times.late_s for times in sums)
        return {"seconds": seconds, "cpu": cpu, "waited": waited, "sent": sum(self.engine.traffic.bytes.values())}


def _run_rank(turns: int, names: Sequence[str], report: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    each = {name: Training(WAYS[name]) for name in names}
    found = [{name: training.turn() for name, training in each.items()} for _ in range(turns)]
    report.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _rates(turns: Sequence[tuple[Mapping[str, Any], ...]], name: str) -> list[float]:
    """Tokens per second of both nodes, by turn."""
    return [ROWS * LENGTH * 2 * WAYS[name].steps / max(sum(rank[name]["seconds"]) for rank in turn) for turn in turns]


def table(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """As Markdown, from the turns of both ranks."""
    rows = [
        "| | tokens/s | of alone | s a step | CPU s a step | s waited a step | idle | MB sent a step |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    turns = list(zip(*ranks, strict=True))  # of both ranks, one turn behind the other
    alone, alone_cpu = _rates(turns, "alone"), _each_step(turns, "alone", "cpu")
    for name in ranks[0][0]:
        rates, steps = _rates(turns, name), WAYS[name].steps
        step, cpu = _each_step(turns, name, "seconds"), _each_step(turns, name, "cpu")
        waited = median(rank[name]["waited"] for turn in turns for rank in turn) / steps
        share = median(its / local for its, local in zip(rates, alone, strict=True))
        sent = ranks[0][0][name]["sent"] / steps / 1e6
        numbers = [step, cpu, waited, alone_cpu / (alone_cpu + waited), sent]
        cells = [name, f"{median(rates):,.0f}", f"{share:.2f}", *(f"{number:.3f}" for number in numbers)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _each_step(turns: Sequence[tuple[Mapping[str, Any], ...]], name: str, key: str) -> float:
    """Seconds of a step, the mean of a turn."""
    seconds: float = median(sum(rank[name][key]) for turn in turns for rank in turn)
    return seconds / WAYS[name].steps


def main() -> None:
    """Print the table; with --report, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rate-mbit", type=int, default=20)
    parser.add_argument("--delay-ms", type=float, default=40.0, help="each way")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="beside alone")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = ["alone", *(name for name in arguments.ways if name != "alone")]
    if arguments.report is not None:
        _run_rank(arguments.turns, names, arguments.report)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are cleaned up then too
    words = ["-m", "benchmarks.rounds", "--turns", str(arguments.turns), "--ways", *names, "--report"]
    with two_nodes(arguments.rate_mbit, arguments.delay_ms) as nodes:
        reports = [json.loads(each) for each in run_ranks(nodes, 1, lambda path: [*words, str(path)], LIMIT_S)]
    numel = sum(parameter.numel() for parameter in Decoder(CONFIG).parameters())
    print(
        f"{numel / 1e6:.2f} M parameters, zero3, one rank a node, {ROWS} x {LENGTH} tokens each, medians of "
        f"{arguments.turns} turns.\nLink: {nodes.shaping}.\n"
    )
    print(table(reports))


if __name__ == "__main__":
    main()
