"""A slow link between two nodes: how long plans take, and how many bytes of theirs go over the link.

Two network namespaces of this machine stand for two nodes, with two gloo ranks in each and a veth pair between them
whose ends send at a limited rate. Ranks of one namespace read each other's memory; to ranks of the other they are on
another machine. All contenders live in the same four processes and step in turn, so they share every busy moment.

The kernel hands packets of up to 64 KiB to the link and counts their headers once. A real link carries about 5% more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import AdamW

import terrazzo as tz
from benchmarks.cpu.cases import Case
from benchmarks.cpu.loops import HYPERPARAMETERS
from benchmarks.cpu.models import Block, Shape
from benchmarks.namespaces import LINK, NODES, Impossible, Nodes, run_ranks, two_nodes
from terrazzo.engine.model.engine import Engine, engine_of
from terrazzo.engine.plan.place import Place, Plan

PER_NODE = 2
SHAPE = Shape(blocks=6, width=512, vocabulary=1024, sequence=32)
LOSS_TOLERANCE = 1e-5
FP32, FP32_BYTES = tz.Precision.named("fp32"), 4
BASELINES = ("zero3", "FSDP2, HSDP")


@dataclass(frozen=True)
class Contender:
    """A plan of Terrazzo's, or FSDP2 if None, on all ranks as one axis or on nodes × ranks of a node."""

    plan: str | None
    two_axes: bool
    precision: tz.Precision = FP32


CONTENDERS = {
    "zero3, one axis": Contender("zero3", two_axes=False),
    "zero3": Contender("zero3", two_axes=True),
    "zero1": Contender("zero1", two_axes=True),
    "hybrid_shard": Contender("hybrid_shard", two_axes=True),
    "hpz": Contender("hpz", two_axes=True),
    "FSDP2, one axis": Contender(None, two_axes=False),
    "FSDP2, HSDP": Contender(None, two_axes=True),
}


@dataclass(frozen=True)
class Setup:
    """What is run. Each contender takes `turns` timed steps, one at a time, after one that is not timed."""

    shape: Shape = SHAPE
    rate_mbit: int = 750
    delay_ms: float = 0.5
    turns: int = 4
    seed: int = 0
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    limit_s: float = 180.0

    @classmethod
    def of_json(cls, text: str) -> Setup:
        """The inverse of `json.dumps(asdict(setup))`."""
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"]), "contenders": tuple(fields["contenders"])})

    @property
    def case(self) -> Case:
        """One sequence per rank: little to compute, all weights to move."""
        return Case(self.shape, 1, "a slow link between two nodes")


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(setup: Setup = Setup()) -> dict[str, Any]:
    """Time the contenders; raw numbers and medians, or why it was not possible here. Takes up to `setup.limit_s`.

    Raises: `RuntimeError` if a rank fails or the contenders do not train the same.
    """
    about = {
        "setup": asdict(setup),
        "case": setup.case.describe(),
        "versions": {"torch": torch.__version__, "terrazzo": tz.__version__, "kernel": platform.release()},
        "threads_per_rank": 1,
        "cores": os.cpu_count(),
    }
    begun = time.perf_counter()
    try:
        with two_nodes(setup.rate_mbit, setup.delay_ms) as nodes:
            reports = _run_ranks(setup, nodes)
    except Impossible as reason:
        return {**about, "possible": False, "reason": str(reason)}
    contenders = {name: _summary([report[name] for report in reports], setup) for name in setup.contenders}
    worst = worst_disagreement([contenders[name]["losses"] for name in setup.contenders])
    if not worst <= LOSS_TOLERANCE:
        raise RuntimeError(f"losses of the contenders differ by up to {worst:.1e}: they do not train the same")
    seconds = time.perf_counter() - begun
    return {
        **about,
        "possible": True,
        "shaping": nodes.shaping,
        "worst_loss_disagreement": worst,
        "run_s": seconds,
        "contenders": contenders,
    }


def _run_ranks(setup: Setup, nodes: Nodes) -> list[dict[str, Any]]:
    """What each rank reports of each contender."""

    def arguments(report: Path) -> list[str]:
        return ["-m", "benchmarks.network", "--setup", json.dumps(asdict(setup)), "--report", str(report)]

    return [json.loads(text) for text in run_ranks(nodes, PER_NODE, arguments, setup.limit_s)]


def _summary(ranks: Sequence[dict[str, Any]], setup: Setup) -> dict[str, Any]:
    """One contender's numbers from those of its ranks; bytes are per step, of both directions together."""
    leaders = ranks[::PER_NODE]
    step_s = [max(turn) for turn in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    one_way = [median(leader["link_bytes"]) for leader in leaders]
    predicted = sum(rank["predicted_bytes"] for rank in ranks) if ranks[0]["predicted_bytes"] is not None else None
    return {
        "step_s": step_s,
        "median_step_s": median(step_s),
        "link_bytes_by_turn": [leader["link_bytes"] for leader in leaders],
        "link_bytes": sum(one_way),
        "inside_bytes": sum(median(leader["inside_bytes"]) for leader in leaders),
        "predicted_bytes": predicted,
        "measured_to_predicted": sum(one_way) / predicted if predicted else None,
        "link_s": 8 * max(one_way) / (setup.rate_mbit * 1e6),
        "losses": [rank["losses"] for rank in ranks],
    }


def worst_disagreement(losses: Sequence[Sequence[Sequence[float]]]) -> float:
    """The largest relative difference between `losses[contender][rank][turn]` and the first contender's."""
    first, *others = [[loss for rank in ranks for loss in rank] for ranks in losses]
    pairs = [(own, expected) for other in others for own, expected in zip(other, first, strict=True)]
    differences = [abs(own / expected - 1) for own, expected in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


# -- one rank ----------------------------------------------------------------------------------------------------------


class Trainee:
    """One contender's model on this rank, and what its steps took."""

    def __init__(self, contender: Contender, case: Case, model: nn.Module) -> None:
        self.case, self.done, self.model = case, 0, model
        mesh = _mesh(contender.two_axes)  # with process groups of its own
        self.predicted_bytes: int | None = None
        if contender.plan is None:
            for module in self.model.modules():
                if isinstance(module, Block):
                    fully_shard(module, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.optimizer = AdamW(self.model.parameters(), **HYPERPARAMETERS)
        else:
            adamw = AdamW(self.model.parameters(), **HYPERPARAMETERS)
            form: dict[str, Any] = {"mesh": mesh, "precision": contender.precision}
            self.model, self.optimizer = tz.shard(self.model, adamw, contender.plan, units=[Block], **form)
            self.predicted_bytes = predicted_bytes(engine_of(self.model)) if contender.precision == FP32 else None
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.passed: dict[str, list[int]] = {LINK: [], "lo": []}

    def step(self) -> None:
        """One training step between barriers; the first rank of a node also reads the node's counters."""
        tokens, targets = self.case.tokens(self.done, dist.get_rank())
        before = sent_by_devices()
        dist.barrier()
        begun = time.perf_counter()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s.append(time.perf_counter() - begun)
        dist.barrier()
        after = sent_by_devices()
        dist.barrier()
        self.losses.append(loss.item())
        for device, sent in self.passed.items():
            sent.append(after[device] - before[device] if after else 0)
        self.done += 1

    def report(self) -> dict[str, Any]:
        """Everything but the first step, JSON-able."""
        return {
            "step_s": self.step_s[1:],
            "losses": self.losses[1:],
            "link_bytes": self.passed[LINK][1:],
            "inside_bytes": self.passed["lo"][1:],
            "predicted_bytes": self.predicted_bytes,
        }


def _mesh(two_axes: bool) -> DeviceMesh:
    shape = (NODES, PER_NODE) if two_axes else (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])


def sent_by_devices() -> dict[str, int]:
    """Bytes sent so far by each network device of this node; nothing but on the node's first rank."""
    if dist.get_rank() % PER_NODE:
        return {}
    return parse_sent(subprocess.run(["ip", "-s", "-j", "link"], capture_output=True, text=True, check=True).stdout)


def parse_sent(text: str) -> dict[str, int]:
    """Bytes sent by each device, from the output of `ip -s -j link`."""
    return {device["ifname"]: device["stats64"]["tx"]["bytes"] for device in json.loads(text)}


def _run_rank(setup: Setup, report: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(setup.seed)
    model = setup.case.model()
    trainees = {name: Trainee(CONTENDERS[name], setup.case, deepcopy(model)) for name in setup.contenders}
    shuffle = random.Random(setup.seed)
    for _ in range(1 + setup.turns):
        for name in shuffle.sample(list(trainees), len(trainees)):
            trainees[name].step()
    report.write_text(json.dumps({name: trainee.report() for name, trainee in trainees.items()}))
    dist.barrier()
    dist.destroy_process_group()


# -- the prediction ----------------------------------------------------------------------------------------------------


def predicted_bytes(engine: Engine) -> int:
    """What this rank sends to other nodes in a step, by the engine's own account of what it sends at all.

    The engine promises totals by kind of collective. Which axis they go along follows from the plan, and the sums over
    the axes must be those totals. Raises: `RuntimeError` if they are not.
    """
    axes = {axis: engine.axes.along(axis) for axis in engine.axes.data}
    sizes = {axis: along.size for axis, along in axes.items()}
    sent: Counter[tuple[str, str]] = Counter()
    for bucket in engine.trainable():
        plan = engine.sharding.plan
        between = Place(bucket.spec.between_axes)
        sent += sent_by_axis(Plan(plan.weight, between, plan.grad, plan.optim), bucket.space.layout.numel, sizes)
    promised = engine.promise.traffic().bytes
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        found = sum(count for (of_kind, _), count in sent.items() if of_kind == kind)
        if found != promised[kind]:
            raise RuntimeError(f"{kind}: {found} bytes along all axes, but the engine promises {promised[kind]}")
    shares = {axis: far_share(dist.get_process_group_ranks(along.group), along.rank) for axis, along in axes.items()}
    return round(sum(count * shares[axis] for (_, axis), count in sent.items()))


def sent_by_axis(plan: Plan, numel: int, sizes: Mapping[str, int]) -> Counter[tuple[str, str]]:
    """Bytes that a rank sends in a step for `numel` fp32 elements, by kind of collective and axis.

    Args:
        plan: in the mesh's axes.
        sizes: of the mesh's data axes.
    """
    weight, between, optim = plan.weight.axes, plan.between.axes, plan.optim.axes
    moves = [("all_gather", weight), ("all_gather", between), ("reduce_scatter", optim)]
    sent: Counter[tuple[str, str]] = Counter()
    for kind, split in moves:
        for axis, count in _gained(split, numel, sizes).items():
            sent[kind, axis] += FP32_BYTES * count
    for axis, count in _gained(optim, numel, sizes).items():
        if axis not in weight:  # updated weights
            sent["all_gather", axis] += FP32_BYTES * count
    own = numel // math.prod(sizes[axis] for axis in optim)
    for axis in sizes.keys() - set(optim):
        sent["all_reduce", axis] += 2 * FP32_BYTES * (own // sizes[axis] * (sizes[axis] - 1))
    return sent


def _gained(split: Sequence[str], numel: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Elements that a rank gains along each axis when its part under `split` becomes whole."""
    gained = {}
    for axis in split:
        gained[axis] = numel - numel // sizes[axis]
        numel //= sizes[axis]
    return gained


def far_share(ranks: Sequence[int], own: int) -> float:
    """Of what a rank sends along an axis, how much goes to other nodes; each other rank gets the same.

    Args:
        ranks: of the axis, as numbered in the job.
        own: the sender's position among them.
    """
    far = sum(rank // PER_NODE != ranks[own] // PER_NODE for rank in ranks)
    return far / (len(ranks) - 1)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    if not record["possible"]:
        return f"Two nodes with a slow link: not possible here. {record['reason']}"
    rows = [
        f"Two nodes of {PER_NODE} ranks. Link: {record['shaping']}. {record['case']}.",
        "",
        "| | step s | × `zero3` | × HSDP | link MB | predicted MB | measured / predicted | link alone s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows += [_row(name, record["contenders"]) for name in record["contenders"]]
    note = (
        "Medians per step. MB: sent over the link, both ways. Link alone: what the busier way takes at the full rate."
    )
    return "\n".join([*rows, "", note])


def targets(record: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """(name, limit, value) of what should hold on a slow link."""
    if not record["possible"]:
        return [("slow link: `hybrid_shard` / `zero3`", 1.0, None)]
    contenders = record["contenders"]
    ratios = {plan: _within_turns(contenders[plan], contenders["zero3"]) for plan in ("hybrid_shard", "hpz")}
    found = [found["measured_to_predicted"] for found in contenders.values()]
    worst = max(max(value, 1 / value) for value in found if value)
    rows = [(f"slow link: `{plan}` / `zero3`", 1.0, ratio) for plan, ratio in ratios.items()]
    return [*rows, ("slow link: bytes measured and predicted, larger / smaller, worst plan", 1.05, worst)]


def _row(name: str, contenders: Mapping[str, Any]) -> str:
    own = contenders[name]
    label = f"Terrazzo `{name}`" if CONTENDERS[name].plan else name
    predicted = own["predicted_bytes"]
    cells = [
        label,
        f"{own['median_step_s']:.2f}",
        *(_ratio(own, contenders.get(baseline)) for baseline in BASELINES),
        f"{own['link_bytes'] / 1e6:.1f}",
        f"{predicted / 1e6:.1f}" if predicted else "",
        f"{own['measured_to_predicted']:.3f}" if predicted else "",
        f"{own['link_s']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(own: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    return "" if baseline is None else f"{_within_turns(own, baseline):.2f}"


def _within_turns(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Median over turns of the ratio of step times within one turn."""
    return float(median(a / b for a, b in zip(own["step_s"], baseline["step_s"], strict=True)))


def main() -> None:
    """Print the table; with --report, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=Setup.turns)
    parser.add_argument("--rate-mbit", type=int, default=Setup.rate_mbit)
    parser.add_argument("--json", type=Path, help="also write the raw record here")
    for hidden in ("--setup", "--report"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report is not None:
        _run_rank(Setup.of_json(arguments.setup), Path(arguments.report))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are cleaned up then too
    record = measure(Setup(turns=arguments.turns, rate_mbit=arguments.rate_mbit))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
    print(table(record))


if __name__ == "__main__":
    main()
