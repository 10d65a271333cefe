"""Whether the planner's order of meshes is that of the engine's steps: `python -m benchmarks.planner.ranking`.

Each case is a model, a batch and a number of ranks, and a few meshes on which the engine trains it, in processes of
this machine. The planner is given what was measured here of one block, one product and one message, and nothing of any
mesh. Steps of the meshes alternate; what counts is the processor's time of all ranks, which neighbours on a shared
machine do not change, beside seconds on the clock.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from benchmarks.planner.ranks import Ranks
from terrazzo.engine import PRECISIONS, Plan, checkpoint_activations, engine_of
from terrazzo.engine.labels.label import Label
from terrazzo.parallel import context_of
from terrazzo.parallel.tensor.activation_exchanges import tensor_ranks
from terrazzo.planner.machine.devices import Cluster, Device, MeasuredHost
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.machine.network import SCALEUP_SHARE
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.rates import MEMORY_SHARE, SUSTAINED_SHARE
from terrazzo.planner.timing.step import time_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig

RESULTS = Path(__file__).parent / "results"
ROUNDS, LEAST_TAU = 3, 0.7
SIZES = DecoderConfig(256, dim=64, layers=4, heads=4, kv_heads=4, ffn_dim=128, max_sequence_length=256)
EXPERTS = MixtureConfig(count=8, top_k=2, ffn_dim=64, shared=0)
MODELS = {
    "narrow": SIZES,
    "wide": replace(SIZES, dim=256, ffn_dim=512),
    "deep": replace(SIZES, layers=8),
    "experts": replace(SIZES, experts=EXPERTS),
}


@dataclass(frozen=True)
class Case:
    """What is trained, on so many ranks."""

    model: str
    ranks: int
    batch: int
    sequence: int
    checkpointing: Any = "none"

    def __str__(self) -> str:
        again = "" if self.checkpointing == "none" else f", checkpointing {self.checkpointing}"
        return f"{self.model}, {self.ranks} ranks, {self.batch} × {self.sequence} tokens{again}"


@dataclass(frozen=True)
class Way:
    """A plan on a mesh."""

    plan: str
    axes: tuple[tuple[str, int], ...] = ()
    schedule: Any = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        order = "" if (self.schedule, self.chunks) == ("1f1b", 1) else f" {self.schedule} {self.chunks}"
        return " ".join([self.plan, *(f"{axis} {size}" for axis, size in self.axes)]) + order

    def mesh(self, ranks: int) -> Mesh:
        """The mesh on `ranks` ranks: dp_shard has all that no other axis takes."""
        sizes = dict(self.axes)
        taken = sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1) * sizes.get("dp_replicate", 1)
        return Mesh(**sizes, dp_shard=ranks // taken)


CASES = (
    *(Case(model, 4, 8, 64) for model in MODELS),
    *(Case(model, 4, 16, 32) for model in MODELS),
    *(Case(model, 8, 16, 32) for model in MODELS),
    *(Case(model, 8, 16, 64) for model in MODELS),
    *(Case(model, 4, 8, 64, "full") for model in MODELS),
)
DENSE = (
    Way("zero1"),
    Way("zero3"),
    Way("zero1", (("tp", 2),)),
    Way("zero1", (("cp", 2),)),
    Way("zero1", (("pp", 2),)),
    Way("zero3", (("pp", 2),)),
    Way("zero1", (("pp", 2), ("tp", 2))),
)
MIXED = (
    Way("zero1"),
    Way("zero3"),
    Way("zero1", (("ep", 2),)),
    Way("zero3", (("ep", 4),)),
    Way("zero1", (("cp", 2),)),
    Way("zero1", (("pp", 2),)),
    Way("zero1", (("pp", 2), ("ep", 2))),
)


def ways_of(case: Case) -> tuple[Way, ...]:
    """The meshes that are compared."""
    return MIXED if case.model == "experts" else DENSE


# -- what the planner says -----------------------------------------------------------------------------------------


def setup_of(case: Case, way: Way, device: Device) -> Setup:
    """The case on a mesh, as the planner sees it."""
    config, mesh = MODELS[case.model], way.mesh(case.ranks)
    values: dict[str, Any] = {"model_type": "terrazzo", **asdict(config)}
    if (experts := values.pop("experts")) is not None:
        values |= {"num_experts": experts["count"], "num_experts_per_tok": experts["top_k"]}
        values |= {"moe_intermediate_size": experts["ffn_dim"], "n_shared_experts": experts["shared"]}
    made = Setup(
        model_shape(values),
        Cluster(replace(device, per_node=case.ranks, scaleup_domain=case.ranks), case.ranks),
        Plan.named(way.plan),
        mesh,
        sequence=case.sequence,
        micro_batches=case.batch // mesh.batch_ranks,
        precision=PRECISIONS["fp32"],
        checkpointing=case.checkpointing,
        pipeline=way.schedule,
        virtual_stages=way.chunks,
    )
    check(made)
    return made


def planned_s(case: Case, way: Way, device: Device) -> float:
    """Seconds of a step by the planner."""
    time = time_of(setup_of(case, way, device))
    assert not isinstance(time, str), time
    return time.step_s


# -- what the engine does, in a rank -------------------------------------------------------------------------------


class Trainee:
    """One way of training, built and ready to step on this rank."""

    def __init__(self, case: Case, way: Way) -> None:
        torch.manual_seed(1)
        self.model: Any = Decoder(MODELS[case.model])
        checkpoint_activations(self.model, case.checkpointing, units=[Block])
        axes = {axis: size for axis, size in way.axes if size > 1}
        mesh = tz.mesh(**axes, device="cpu")
        tz.parallelize(self.model, mesh, pipeline=tz.Pipeline(way.schedule, way.chunks) if "pp" in axes else None)
        context = context_of(self.model)
        self.model, self.optimizer = tz.shard(
            self.model, lambda p: torch.optim.AdamW(p), way.plan, units=[Block], mesh=mesh
        )
        tokens = torch.randint(256, (1, case.sequence), generator=torch.Generator().manual_seed(dist.get_rank()))
        positions = torch.arange(case.sequence).expand(1, -1)
        given, places = context.split(tokens, positions) if context else (tokens, positions)
        self.batch = [((given, places), given)] * (case.batch // way.mesh(case.ranks).batch_ranks)

    def step(self) -> tuple[float, float]:
        """Seconds of the processor, with all threads, and of the clock."""
        dist.barrier()
        busy, began = time.process_time(), time.perf_counter()
        tz.step(self.model, self.batch, loss_of, denominator=1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - busy, time.perf_counter() - began

    def close(self) -> None:
        """End its threads."""
        engine_of(self.model).close()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def run(case: Case, ways: Sequence[Way], rounds: int) -> list[list[tuple[float, float]]]:
    """Steps of each way, which alternate; the first of each, which learns the order, is left out."""
    trainees = [Trainee(case, way) for way in ways]
    found = [[each.step() for each in trainees] for _ in range(rounds + 1)][1:]
    for each in trainees:
        each.close()
    return [list(steps) for steps in zip(*found, strict=True)]


def rates() -> dict[str, float]:
    """Figures of one rank alone: products and memory per second, and what a block takes beside, processor seconds."""
    a, big = torch.randn(256, 256), torch.randn(4 << 20)
    product = _cpu_s(lambda: a @ a, 50)
    copied = _cpu_s(lambda: big + 1.0, 10)
    blocks = {layers: Case("narrow", 1, 4, 8) for layers in (2, 6)}
    steps = {}
    for layers, case in blocks.items():
        MODELS["narrow"] = replace(SIZES, layers=layers)
        trainee = Trainee(case, Way("zero0"))
        trainee.step()
        steps[layers] = min(trainee.step()[0] for _ in range(SMALL_STEPS))
        trainee.close()
    MODELS["narrow"] = SIZES
    return {
        "flops": 2 * 256**3 / product,
        "memory": 2 * big.nbytes / copied,
        "block_s": (steps[6] - steps[2]) / 4 / len(Trainee(Case("narrow", 1, 4, 8), Way("zero0")).batch),
    }


def links() -> dict[str, float]:
    """Figures of ranks together: bytes per second, and what an exchange costs beside, seconds of this rank's processor.

    By exchanges as modules make them, there and back, between two and between four; and by how much longer a step of a
    small model takes where its units are gathered.
    """
    spent: dict[tuple[int, int], float] = {}
    for size, numel in ((2, 16), (4, 16), (4, 1 << 18)):
        ranks = tensor_ranks(tz.mesh(tp=size, device="cpu")).labelled(Label())
        own = torch.zeros(1, 2, numel, requires_grad=True)
        spent[size, numel] = (
            _cpu_s(lambda ranks=ranks, own=own: ranks.all_gather_sequence(own).sum().backward(), 30) / 2
        )
    hop = max(0.0, spent[4, 16] - spent[2, 16]) / 2
    sent = 2 * own.element_size() * (1 << 18) * 3
    call = spent[2, 16] - hop
    plain, gathering, staged = (_small_step(way) for way in SMALL)
    unit = (gathering[0] - plain[0]) / (gathering[1] - plain[1])
    stage = (staged[0] - plain[0] + unit * (plain[1] - staged[1])) / staged[2]
    told = {"hop_s": hop, "call_s": call, "unit_s": max(0.0, unit - spent[4, 16]), "stage_s": max(0.0, stage - call)}
    return told | {"bytes": sent / (spent[4, 1 << 18] - spent[4, 16])}


SMALL = (Way("zero1"), Way("zero3"), Way("zero1", (("pp", 2),)))
"""What gathering units of a small model takes more, and what stages take more that run as many blocks."""


def _small_step(way: Way) -> tuple[float, float, float]:
    """Seconds of a step, and how many exchanges of states and messages between stages it has on a rank."""
    trainee = Trainee(Case("narrow", 4, 8, 8), way)
    traffic = engine_of(trainee.model).traffic
    trainee.step()
    traffic.reset()
    seconds = min(trainee.step()[0] for _ in range(SMALL_STEPS))
    sends = traffic.count["send"] / SMALL_STEPS
    states = sum(traffic.count[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce")) / SMALL_STEPS
    trainee.close()
    return seconds, states, sends


SMALL_STEPS = 15


def _cpu_s(work: Any, times: int) -> float:
    """Processor seconds, the least of `times`."""
    work()
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


# -- both ----------------------------------------------------------------------------------------------------------


def measured_device(four: Ranks, alone: Ranks) -> Device:
    """This machine, as one rank has it."""
    found, told = alone.call(rates)[0], four.call(links)
    joined = {name: statistics.mean(each[name] for each in told) for name in told[0]}
    flops = found["flops"]
    return Device(
        "here",
        kind="cpu",
        peak_flops={"fp32": flops / SUSTAINED_SHARE},
        matmul_flops={"fp32": flops / SUSTAINED_SHARE},
        memory_bandwidth=found["memory"] / MEMORY_SHARE,
        scaleup_bandwidth=joined["bytes"] / SCALEUP_SHARE,
        launch_s=found["block_s"],
        measured=MeasuredHost(
            joined["call_s"], joined["hop_s"], joined["unit_s"], joined["stage_s"], cores=os.cpu_count()
        ),
    )


def tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's: of all pairs, those in the same order less those in the other."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    return sum(_sign(first[a] - first[b]) * _sign(second[a] - second[b]) for a, b in pairs) / len(pairs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def main(arguments: Sequence[str]) -> int:
    """Prints a table; 1 where the order is not the planner's. Arguments: which cases, all by default."""
    rows = []
    with Ranks(1) as alone, Ranks(4) as four, Ranks(8) as eight:
        device = measured_device(four, alone)
        print(_shown(device), flush=True)
        for case in [CASES[int(each)] for each in arguments] or CASES:
            rows.append(compared(case, four if case.ranks == 4 else eight, device))
            print(_table(rows[-1], os.cpu_count() or 1), flush=True)
    return _verdict(rows, device, save=not arguments)


def compared(case: Case, ranks: Ranks, device: Device) -> dict[str, Any]:
    """Seconds of a step of each way, as planned, of all processors, and of the clock; and how the orders agree."""
    ways = ways_of(case)
    told = ranks.call(run, case, ways, ROUNDS)
    busy, wall = [], []
    for index in range(len(ways)):
        steps = list(zip(*(rank[index] for rank in told), strict=True))
        busy.append(statistics.median(sum(each[0] for each in step) for step in steps))
        wall.append(statistics.median(max(each[1] for each in step) for step in steps))
    plan = [planned_s(case, way, device) for way in ways]
    row = {"case": str(case), "ways": list(map(str, ways)), "planned": plan, "busy": busy, "clock": wall}
    return row | {"tau": tau(plan, busy), "tau_clock": tau(plan, wall)}


def _shown(device: Device) -> str:
    names, host = ("call_s", "hop_s", "unit_s", "stage_s"), device.measured
    times = {"launch_s": device.launch_s or 0.0, **{name: getattr(host, name) for name in names}}
    given = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in times.items())
    sent = (device.scaleup_bandwidth or 0.0) * SCALEUP_SHARE / 1e9
    return f"{device.matmul_flops['fp32'] * SUSTAINED_SHARE / 1e9:.1f} GFLOP/s, {sent:.2f} GB/s, {given}"


def _table(row: dict[str, Any], cores: int) -> str:
    lines = [f"{row['case']:48} tau {row['tau']:+.2f}, by the clock {row['tau_clock']:+.2f}"]
    ways = zip(row["ways"], row["planned"], row["busy"], row["clock"], strict=True)
    for way, plan, busy, wall in sorted(ways, key=lambda each: each[2]):
        per_core = busy / cores
        lines.append(f"    {way:24} planned {plan:6.3f} s, busy / cores {per_core:6.3f}, clock {wall:6.3f}")
    return "\n".join(lines)


def _verdict(rows: Sequence[dict[str, Any]], device: Device, save: bool) -> int:
    """The middle case, and all pairs of all cases."""
    middle, pairs = {}, {}
    sizes = [len(row["ways"]) * (len(row["ways"]) - 1) // 2 for row in rows]
    for name in ("tau", "tau_clock"):
        found = [row[name] for row in rows]
        middle[name] = statistics.median(found)
        pairs[name] = sum(each * size for each, size in zip(found, sizes, strict=True)) / sum(sizes)
        print(f"{name}: median {middle[name]:.2f}, of all pairs {pairs[name]:.2f}")
    if save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({"device": asdict(device), "median": middle, "pairs": pairs, "cases": rows}, indent=1)
        (RESULTS / "ranking.json").write_text(text + "\n")
    return int(min(middle["tau"], pairs["tau"]) < LEAST_TAU)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(sys.argv[1:]))
