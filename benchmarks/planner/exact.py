"""Arithmetic that has one right answer, and verdicts that are known: the planner against papers."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.shapes import Sizes, transformer
from terrazzo.engine import Plan, Precision
from terrazzo.messages import GIB
from terrazzo.planner.assemble import estimate
from terrazzo.planner.choice.fewest import floor_gpus
from terrazzo.planner.layout.stages import in_flight
from terrazzo.planner.machine.devices import Cluster, device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.activations import block_activations
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.report.bare import BareAnswer
from terrazzo.planner.setup.build_setup import build_setup, counts_of
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.timeline import StageSchedule
from terrazzo.words import CheckpointMode

__all__ = ["Check", "Verdict", "checks", "feasibility"]

GB = 1e9


@dataclass(frozen=True)
class Check:
    """A number that follows from its inputs. `tolerance` is absolute: half of the last digit published."""

    name: str
    unit: str
    expected: float
    found: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.found - self.expected) <= self.tolerance


@dataclass(frozen=True)
class Verdict:
    """Whether a run is known to fit, and what the planner says."""

    name: str
    expected: str
    found: str

    @property
    def holds(self) -> bool:
        return self.expected == self.found


def checks() -> list[Check]:
    """All of them."""
    return [*_states(), *_traffic(), *_sizing(), *_topology(), *_activations(), *_bubbles()]


def feasibility() -> list[Verdict]:
    """Runs that are known to fit or not to."""
    return [_verdict(name, request, fits) for name, request, fits in FEASIBILITY]


ZERO = {"zero0": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
"""GB per device of 7.5e9 parameters on 64 (arXiv 1910.02054, figure 1)."""
SEVENTY = {"zero0": 1120, "zero1": 283.28, "zero2": 143.83, "zero3": 4.38}
"""GB per device of 70e9 parameters on 256, by the same formulas."""


def _states() -> Iterator[Check]:
    for params, gpus, table in ((7.5e9, 64, ZERO), (70e9, 256, SEVENTY)):
        for plan, expected in table.items():
            setup = build_setup(Request(params, gpus, strategy=plan, precision="zero"))
            found = sum(term.value for term in state_terms(setup, 0)) / GB
            digits = len(str(expected).partition(".")[2])
            name = f"states, {params / 1e9:g}B on {gpus}, {plan}"
            yield Check(name, "GB", expected, found, 0.5 * 10**-digits)


def _traffic() -> Iterator[Check]:
    for plan, expected in (("zero2", 280), ("zero3", 420)):
        report = BareAnswer(Request(70e9, 256, strategy=plan, precision="zero")).report()
        yield Check(f"traffic, 70B in bf16, {plan}", "GB", expected, report.plans[0].traffic_gb["total"], 0.5)


def _sizing() -> Iterator[Check]:
    """70B under ZeRO-3 on devices of 80 GB, each with 18 GB of what is not state."""
    states, room, other = 16 * 70e9, 80 * GB, 18 * GB
    yield Check("sizing, 70B, floor for the states", "GPUs", 14, floor_gpus(states, room), 0)
    runs = next(gpus for gpus in counts_of(Request(70e9, "1..64"), 8) if _with_other(gpus, other) <= room)
    yield Check("sizing, 70B, with 18 GB beside, whole hosts", "GPUs", 24, runs, 0)
    for gpus, expected in ((16, 88.0), (24, 64.7), (32, 53.0)):
        yield Check(f"sizing, 70B on {gpus}, zero3 and 18 GB", "GB", expected, _with_other(gpus, other) / GB, 0.05)


def _with_other(gpus: int, other_bytes: float) -> float:
    """Bytes of each device, with the states as they are planned."""
    setup = build_setup(Request(70e9, gpus, strategy="zero3", precision="zero"))
    return sum(term.value for term in state_terms(setup, 0)) + other_bytes


def _topology() -> Iterator[Check]:
    mesh = Mesh(dp_shard=8, tp=4, pp=2, cp=2)
    yield Check("topology, 8 × 4 × 2 × 2", "ranks", 128, mesh.world_size, 0)


def _activations() -> Iterator[Check]:
    """Activations of the first rank along pp, to 0.5 % of arXiv 2205.05198 figure 1 (calculon-ai validation.py)."""
    with (Path(__file__).parent / "data" / "groundtruth.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"].startswith("kortmem")]
    for row in rows:
        found = re.search(r"act=([\d.]+)GiB", row["notes"])
        assert found, row["id"]
        setup = _megatron(row)
        block = setup.model.repeated[0].block
        assert block
        saved = block_activations(setup, block).saved * setup.model.layers / setup.mesh.pp
        value = saved * in_flight(setup, 0) / GIB
        name = f"activations, {row['model']}, {'TP + SP, selective' if setup.sequence_parallel else 'TP'}"
        yield Check(name, "GiB", float(found[1]), value, 0.005 * float(found[1]))


def _megatron(row: dict[str, str]) -> Setup:
    layers, hidden, heads = int(row["layers"]), int(row["hidden"]), int(row["heads"])
    sizes = Sizes(row["model"], layers, hidden, 4 * hidden, heads, heads, 51200, learned=2048, dropout=True)
    mode: CheckpointMode = "none" if row["ac"] == "none" else "selective"
    return Setup(
        model=transformer(sizes),
        cluster=Cluster(device("A100-SXM4-80GB"), int(row["n_gpus"])),
        plan=Plan.named("zero0"),
        mesh=Mesh(tp=8, pp=int(row["pp"])),
        sequence=2048,
        micro_batch=int(row["micro_batch"]),
        micro_batches=int(row["global_batch"]) // int(row["micro_batch"]),
        precision=Precision.named("fp16"),
        matmul="fp16",
        checkpointing=mode,
        attention="math",
        sequence_parallel=mode == "selective",
        accumulate_locally=True,
        virtual_stages=3 if row["model"] in ("GPT3-175B", "MT-NLG-530B") else 1,
    )


def _bubbles() -> Iterator[Check]:
    """Idle share of the useful time of 8 stages and 32 micro-batches (arXiv 2104.04473, section 2.2)."""
    for name, virtual, expected in (("GPipe and 1F1B", 1, 0.21875), ("interleaved, 4 chunks", 4, 0.0546875)):
        passes = [[(1.0, 2.0)] * virtual] * 8
        idle = StageSchedule("1f1b", 8, virtual, 32).seconds(passes) / (3 * virtual * 32) - 1
        yield Check(f"bubble, {name}", "of useful time", expected, idle, 1e-12)


V100 = Request(0, 1, gpu="V100-SXM2-32GB", precision="zero", host_memory_bytes=1.5e12)
FEASIBILITY = (
    ("Llama 70B, 8 × A100 80 GB, zero3", Request(70e9, 8, gpu="A100-SXM4-80GB", strategy="zero3"), False),
    ("Llama 70B, 8 × A100 80 GB, zero2", Request(70e9, 8, gpu="A100-SXM4-80GB", strategy="zero2"), False),
    ("GPT 1.4B, one V100 32 GB", replace(V100, model=1.4e9, strategy="zero0"), True),
    ("GPT 13B, one V100 32 GB", replace(V100, model=13e9, strategy="zero0"), False),
    ("GPT 10B, one V100 32 GB, zero2@cpu", replace(V100, model=10e9, strategy="zero2@cpu"), True),
    ("GPT 13B, one V100 32 GB, zero2@cpu", replace(V100, model=13e9, strategy="zero2@cpu"), True),
    ("GPT 40B, one V100 32 GB, zero3@cpu-all", replace(V100, model=40e9, strategy="zero3@cpu-all"), True),
)
"""What published runs settle: the 70B rows need 140 GB for states alone; one V100 trains 1.4B alone and 13B with
ZeRO-Offload (arXiv 2101.06840), 40B with weights on the host too (DeepSpeed, zero3-offload, 2021)."""


def _verdict(name: str, request: Request, fits: bool) -> Verdict:
    return Verdict(name, _word(fits), _word(estimate(build_setup(request)).memory.fits))


def _word(fits: bool | None) -> str:
    return "not known" if fits is None else "fits" if fits else "does not fit"
