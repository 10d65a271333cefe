"""What an update takes: the sharded fused AdamW step and the clip by the global norm, on two gloo ranks.

A thousand small tensors show the cost per tensor, a few large ones the cost per element. All contenders live in the
same two processes and take turns, and every update has gradients from a backward of its own, which is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.contenders import CONTENDERS, Alone, DeepSpeed, installed
from benchmarks.cpu.loops import Loop
from benchmarks.cpu.rank import join
from benchmarks.environment import versions

RANKS = 2
NORM = 1.0
SEQUENCE = 8  # short: a backward only has to leave gradients
MODELS = {
    "small": replace(CASES["small"], shape=replace(CASES["small"].shape, sequence=SEQUENCE), clip=NORM),
    "large": replace(CASES["traffic"], shape=replace(CASES["traffic"].shape, blocks=7, sequence=SEQUENCE), clip=NORM),
    "tiny": replace(CASES["tiny"], clip=NORM),
}
FLOOR, OWN, PEER = "floor", "terrazzo-zero3", "fsdp2"
NAMES = (FLOOR, PEER, "deepspeed-1", "deepspeed-2", OWN, "terrazzo-zero1", "terrazzo-zero2")
LIMIT = 0.2
"""Step and clip of a thousand small tensors over the peer's, at most."""


@dataclass(frozen=True)
class Effort:
    """What is run: updates per contender and model, after untimed ones."""

    rounds: tuple[tuple[str, int], ...] = (("small", 10), ("large", 4))
    warmup: int = 1
    contenders: tuple[str, ...] = NAMES
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """Seconds of one update on one rank. DeepSpeed's step clips as well, so its clip is what a clipping step adds.

    Attributes:
        step_s: `optimizer.step` and `zero_grad`, not clipping.
        clipped_s: the same and the clip.
    """

    step_s: float
    clipped_s: float


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(effort: Effort = Effort()) -> dict[str, Any]:
    """Time every contender on every model; raw numbers and medians over the slower rank. Takes about 70 s."""
    begun = time.perf_counter()
    there = tuple(name for name in effort.contenders if name == FLOOR or installed([name]))
    with tempfile.TemporaryDirectory(prefix="terrazzo-bench-") as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        spawn(_run_rank, (folder, replace(effort, contenders=there)), nprocs=RANKS)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    models = {model: _summary(model, [rank[model] for rank in ranks]) for model, _ in effort.rounds}
    return {
        "effort": asdict(effort),
        "versions": versions("torch", "deepspeed"),
        "not_installed": [name for name in effort.contenders if name not in there],
        "ranks": RANKS,
        "threads_per_rank": 1,
        "cores": os.cpu_count(),
        "run_s": time.perf_counter() - begun,
        "models": models,
    }


def _summary(model: str, ranks: Sequence[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Of one model, from what its ranks measured of each contender."""
    sizes = [parameter.numel() for parameter in MODELS[model].model("meta").parameters()]
    updates = {name: slower([[Update(**update) for update in rank[name]] for rank in ranks]) for name in ranks[0]}
    return {
        "about": MODELS[model].describe(),
        "tensors": len(sizes),
        "elements": sum(sizes),
        "contenders": {
            name: {
                "step_s": median(update.step_s for update in own),
                "clipped_s": median(update.clipped_s for update in own),
                "ratio": ratio(own, updates[PEER]) if PEER in updates else None,
                "updates": [asdict(update) for update in own],
            }
            for name, own in updates.items()
        },
    }


def slower(ranks: Sequence[Sequence[Update]]) -> list[Update]:
    """Each update as long as it took the slower rank."""
    turns = zip(*ranks, strict=True)
    return [Update(max(u.step_s for u in turn), max(u.clipped_s for u in turn)) for turn in turns]


def ratio(own: Sequence[Update], peer: Sequence[Update]) -> float:
    """Median over rounds of the ratio of step and clip together."""
    return median(a.clipped_s / b.clipped_s for a, b in zip(own, peer, strict=True))


# -- one rank ----------------------------------------------------------------------------------------------------------


class Floor(Alone):
    """One flat tensor with a rank's share of the elements: no engine, nothing sent, the gradient always there."""

    def clip(self, norm: float) -> None:
        self.share.grad = self.gradient
        nn.utils.clip_grad_norm_([self.share], norm)

    def update(self) -> None:
        self.share.grad = self.gradient
        self.optimizer.step()


def _updates(name: str, loop: Loop) -> Iterator[Update]:
    """Train for ever; each update is timed from a common start, with gradients of its own."""
    batches = (loop.case.tokens(number, dist.get_rank()) for number in range(1 << 30))

    def ready() -> None:
        if name != FLOOR:
            tokens, targets = next(batches)
            loop.backward(F.cross_entropy(loop.model(tokens).flatten(0, 1), targets.flatten()), True)
        dist.barrier()

    def step() -> None:
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    while True:
        ready()
        if isinstance(loop, DeepSpeed):
            loop.optimizer.clip_grad = NORM  # type: ignore[attr-defined]
            clipped_s = _seconds(loop.update)
            loop.optimizer.clip_grad = 0.0  # type: ignore[attr-defined]
            ready()
            yield Update(_seconds(loop.update), clipped_s)
        else:
            clip_s = _seconds(lambda: loop.clip(NORM))
            step_s = _seconds(loop.update if name == FLOOR else step)
            yield Update(step_s, clip_s + step_s)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _run_rank(rank: int, folder: str, effort: Effort) -> None:
    join(rank, RANKS, os.path.join(folder, "store"), limit_s=60)
    found = {model: _take_turns(MODELS[model], rounds, effort) for model, rounds in effort.rounds}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _take_turns(case: Case, rounds: int, effort: Effort) -> dict[str, list[dict[str, float]]]:
    """Of one model: each contender's updates on this rank, in an order shuffled for each round."""
    updates = {}
    for name in effort.contenders:
        torch.manual_seed(effort.seed)
        start = Floor if name == FLOOR else CONTENDERS[name].start
        updates[name] = _updates(name, start(case.model(), case))
    shuffle = random.Random(effort.seed)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in updates}
    for _ in range(effort.warmup + rounds):
        for name in shuffle.sample(list(updates), len(updates)):
            found[name].append(asdict(next(updates[name])))
    return {name: taken[effort.warmup :] for name, taken in found.items()}


# -- the report --------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    head = ["model", "", "step µs per tensor", "with clip", "step ns per element", "with clip", "× FSDP2"]
    rows = [head, ["---", "---", *["--:"] * 5]]
    for model, found in record["models"].items():
        for name, of in found["contenders"].items():
            per_tensor = [1e6 * of[key] / found["tensors"] for key in ("step_s", "clipped_s")]
            per_element = [1e9 * of[key] / found["elements"] for key in ("step_s", "clipped_s")]
            times = "" if of["ratio"] is None else f"{of['ratio']:.2f}"
            rows.append([model, name, *(f"{n:.1f}" for n in per_tensor), *(f"{n:.2f}" for n in per_element), times])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    sizes = "; ".join(f"{model}: {found['about']}" for model, found in record["models"].items())
    missing = [f"Not installed: {', '.join(record['not_installed'])}."] if record["not_installed"] else []
    return "\n".join([*lines, "", f"{sizes}.", HOW, *missing])


HOW = """A step counts `zero_grad`; tensors and elements are those of the whole model, of which a rank steps half. The
ratio is of step and clip together. `zero1`, `zero2` and DeepSpeed also gather the updated weights in it, and DeepSpeed
finds the norm whether it clips or not. The floor is one flat tensor of half the elements. Two gloo ranks, one thread
each, fp32, fused AdamW; medians of the slower rank."""


def targets(record: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(name, limit, measured) for each target that this decides."""
    own = record["models"].get("small", {"contenders": {}})["contenders"].get(OWN)
    return [("step + clip, 1,000 small tensors: `zero3` / FSDP2", LIMIT, own["ratio"] if own else None)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[model for model, _ in Effort.rounds])
    chosen = parser.parse_args().models
    known = dict(Effort.rounds)
    print(table(measure(Effort(rounds=tuple((model, known.get(model, 3)) for model in chosen)))))


if __name__ == "__main__":
    main()
