"""One rank on one GPU, measured: against plain PyTorch where it is alone, against FSDP2 where it plays one of many.

    python -m benchmarks.gpu [--only '1B-*'] [--rounds 3] [--out record.json]

Four questions. What does the engine cost where it has nothing to do (world 1)? How much of the GPU does it use? Do its
steps and its memory differ from FSDP2's at world 8 and 64, the network left out? What do views save over copying each
parameter out of what was gathered? Where there is no CUDA device, it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cpu.contenders import installed
from benchmarks.environment import versions
from benchmarks.gpu.contenders import Setup, Workload
from benchmarks.gpu.process import Failed, Seat
from benchmarks.gpu.rank import CopyOut, Rank
from benchmarks.gpu.report import table, targets
from terrazzo.planner.machine.devices import this_machine
from terrazzo.train.model.decoder import DecoderConfig

LLAMA_8B = DecoderConfig(128_256, 4096, 32, 32, 8, 14_336, 8192, rope_theta=500_000.0, tie_embeddings=False)
LLAMA_1B = DecoderConfig(128_256, 2048, 16, 32, 8, 8192, 8192, rope_theta=500_000.0)
"""Llama 3.1 8B and 3.2 1B (arXiv 2407.21783), with sequences of 8192 tokens as in its training."""

# Four blocks of the 8 B model, so that the whole states of four contenders fit on one GPU.
WIDE = DecoderConfig(32_768, 4096, 4, 32, 8, 14_336, 4096, rope_theta=500_000.0, tie_embeddings=False)

# A block of Qwen3-30B-A3B (arXiv 2505.09388): norms, attention, router, and 128 experts in two stacks.
EXPERTS = [(2048,), (2048,), (128,), (128,), (4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)]
EXPERTS += [(128, 1536, 2048), (128, 2048, 768)]


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        alone: at world 1, where a rank holds all states.
        sharded: models at each of `worlds`, by name.
        compiler: torch.compile's backend.
        blocks: parameter shapes of a block by name, for copies against views at the first of `worlds`.
    """

    alone: Workload
    sharded: Mapping[str, Workload]
    worlds: tuple[int, ...]
    compiler: str
    blocks: Mapping[str, Sequence[tuple[int, ...]]]


def block_shapes(workload: Workload) -> list[tuple[int, ...]]:
    """Of one block's parameters."""
    return [tuple(p.shape) for p in workload.meta_model().blocks[0].parameters()]


FULL = Shapes(
    alone=Workload(WIDE, batch=2),
    sharded={"1B": Workload(LLAMA_1B, 1, checkpointing=True), "8B": Workload(LLAMA_8B, 1, checkpointing=True)},
    worlds=(8, 64),
    compiler="inductor",
    blocks={"dense, 8B": block_shapes(Workload(LLAMA_8B, 1)), "128 experts, 30B-A3B": EXPERTS},
)

_TOY = Workload(DecoderConfig(128, 64, 2, 4, 2, 128, 32), batch=2, checkpointing=True)
TINY = Shapes(_TOY, {"toy": _TOY}, (8,), "aot_eager", {"toy": block_shapes(_TOY)})
"""For trying the benchmark itself on a CPU."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: `rounds` of turns of `steps` steps, of cases and contenders whose names match a glob."""

    rounds: int = 3
    steps: int = 6
    only: str = "*"
    contenders: str = "*"


def measure(device: str = "cuda", shapes: Shapes = FULL, effort: Effort = Effort()) -> dict[str, Any]:
    """Everything, as a record that JSON can hold; an estimated 20 minutes for `FULL`.

    Args:
        device: `cuda`, or `cpu` to try the benchmark itself.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return {"device": "no CUDA device"}
    name = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU ({platform.machine()})"
    peak_flops = this_machine().device.peak_flops.get("bf16") if device == "cuda" else None
    record: dict[str, Any] = {"device": name, "peak_flops": peak_flops, "versions": _versions()}
    record |= {"threads": torch.get_num_threads() if device == "cuda" else 1, "effort": asdict(effort)}
    record["cases"] = {
        case: run(case, among, effort.rounds, record["peak_flops"])
        for case, setups in cases(device, shapes, effort.steps)
        if fnmatch(case, effort.only) and (among := [s for s in setups if fnmatch(s.contender, effort.contenders)])
    }
    record["copy_out"] = {
        block: copy_out(device, shapes.worlds[0], of_block, effort.rounds)
        for block, of_block in shapes.blocks.items()
        if fnmatch("copy-out", effort.only)
    }
    return record | {"targets": targets(record)}


def _versions() -> dict[str, str | None]:
    return {**versions("torch", "terrazzo", "deepspeed"), "cuda": torch.version.cuda}


def cases(device: str, shapes: Shapes, steps: int) -> Iterator[tuple[str, list[Setup]]]:
    """Each case's name and contenders, the baseline first."""
    modes = {"eager": None, "compiled": shapes.compiler}
    for mode, compiler in modes.items():
        names = ["plain", "terrazzo", "fsdp2"]
        # DeepSpeed's hooks sit on every layer, inside what would be compiled.
        names += ["deepspeed"] if compiler is None and installed(["deepspeed-3"]) else []
        yield f"alone-{mode}", [Setup(name, shapes.alone, device, 1, compiler, steps) for name in names]
    if device == "cuda":
        names = ["terrazzo", "fsdp2"] + (["deepspeed"] if installed(["deepspeed-3"]) else [])
        yield "offload-eager", [Setup(name, shapes.alone, device, 1, None, steps, offload=True) for name in names]
    for (model, workload), world, (mode, compiler) in product(shapes.sharded.items(), shapes.worlds, modes.items()):
        setups = [Setup(name, workload, device, world, compiler, steps) for name in ("fsdp2", "terrazzo")]
        yield f"{model}-{world}-{mode}", setups


def run(case: str, setups: Sequence[Setup], rounds: int, peak_flops: float | None) -> dict[str, Any]:
    """All turns of one case. A contender that fails is left out from then on, and its reason kept."""
    workload, world = setups[0].workload, setups[0].world
    about = {"world": world, "parameters": workload.numel, "tokens": workload.tokens, "flops": workload.flops}
    found: dict[str, dict[str, Any]] = {setup.contender: {"turns": []} for setup in setups}
    with ExitStack() as stack:
        seats: dict[str, Seat] = {}
        for setup in setups:
            try:  # one after the other: each finds out whether there is room for it
                seats[setup.contender] = stack.enter_context(Seat(Rank, setup))
            except Failed as failure:
                _note(case, setup.contender, found[setup.contender], failure)
        for number in range(rounds):
            for name in random.Random(number).sample(sorted(seats), len(seats)):
                _ask(case, name, seats, found[name])
        for name in list(seats):
            _ask(case, name, seats, found[name], profile=True)
    return about | {"contenders": {name: summed(each, about, peak_flops) for name, each in found.items()}}


def _ask(case: str, name: str, seats: dict[str, Seat], found: dict[str, Any], profile: bool = False) -> None:
    try:
        if profile:
            found |= seats[name].call("profile")
        else:
            found["turns"].append(seats[name].call("turn"))
            print(f"{case} {name}: {median(found['turns'][-1]['step_s']):.4f} s a step", file=sys.stderr, flush=True)
    except Failed as failure:
        seats.pop(name).close()
        _note(case, name, found, failure)


def _note(case: str, name: str, found: dict[str, Any], failure: Failed) -> None:
    found["failed"] = str(failure)
    print(f"{case} {name}: {failure}", file=sys.stderr, flush=True)


def summed(found: dict[str, Any], about: dict[str, int], peak_flops: float | None) -> dict[str, Any]:
    """A contender's turns and what follows from them.

    `host_gap_s` is the part of a step in which the GPU ran nothing.
    """
    if not found["turns"]:
        return found
    step_s = median(median(turn["step_s"]) for turn in found["turns"])
    busy_s = found.get("busy_s")
    return found | {
        "step_s": step_s,
        "tokens_per_s": about["tokens"] / step_s,
        "mfu": about["flops"] / step_s / peak_flops if peak_flops else None,
        "peak_bytes": max(turn["peak_bytes"] for turn in found["turns"]),
        "host_gap_s": max(0.0, step_s - busy_s) if busy_s else None,
    }


def copy_out(device: str, world: int, shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Seconds of each way to bring a block's parameters to its modules, medians over the rounds."""
    try:
        with Seat(CopyOut, device, world, shapes) as seat:
            turns = [seat.call("turn") for _ in range(rounds)]
    except Failed as failure:
        return {"failed": str(failure)}
    medians = {way: median(turn[way] for turn in turns) for way in turns[0]}
    return {"world": world, "numel": sum(torch.Size(shape).numel() for shape in shapes), "turns": turns, **medians}


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="The engine on one GPU, against plain PyTorch and FSDP2.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: toy shapes, to try it")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on CUDA too, for a simulated device")
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--steps", type=int, default=Effort.steps, help="in a turn")
    parser.add_argument("--only", default=Effort.only, help="glob of cases, such as 'alone-*' or 'copy-out'")
    parser.add_argument("--contenders", default=Effort.contenders, help="glob of them, such as '[td]*'")
    parser.add_argument("--out", type=Path, help="where the record goes, as JSON")
    options = parser.parse_args()
    shapes = FULL if options.device == "cuda" and not options.tiny else TINY
    record = measure(options.device, shapes, Effort(options.rounds, options.steps, options.only, options.contenders))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
