"""Host time: what an engine's own Python takes around a model, per unit and per step.

One process stands for a rank of a large job, with torch's `fake` process group: nothing is sent, so there is nothing to
wait for. The arithmetic is tiny, and the step of the same model without an engine is subtracted. What is left decides
whether the host keeps up with a fast device, and how many units are too many.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.contenders import CONTENDERS, installed
from benchmarks.cpu.loops import HYPERPARAMETERS, Loop
from benchmarks.cpu.models import UNITS, Shape
from benchmarks.environment import versions

MODELS = {"small": CASES["small"], "decoder": Case(Shape(24, 64, 256, 32), 1, "a narrow decoder")}
OWN, PEER = "terrazzo-zero3", "fsdp2"
LIMIT = 0.4
"""Host time per unit over the peer's, at most."""
LIMIT_RANKS = 8


@dataclass(frozen=True)
class Effort:
    """What is run: turns of each contender by size of the job, timed steps per turn, and untimed steps before them."""

    rounds: tuple[tuple[int, int], ...] = ((8, 10), (512, 5))
    steps: int = 3
    warmup: int = 2
    models: tuple[str, ...] = tuple(MODELS)
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """Seconds of one step, without those that the fake group spends in copying.

    Attributes:
        pass_s: forward and backward.
        update_s: `optimizer.step` and `zero_grad`.
        fake_s: the fake group's copies.
    """

    pass_s: float
    update_s: float
    fake_s: float


@dataclass(frozen=True)
class Turn:
    """Steps of one contender, each right after a step of the plain model in the same process."""

    model: str
    ranks: int
    contender: str
    plain: list[Step]
    sharded: list[Step]

    def above_plain_s(self) -> float:
        """Forward and backward: the median step less the median plain one."""
        return median(step.pass_s for step in self.sharded) - median(step.pass_s for step in self.plain)


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(effort: Effort = Effort()) -> dict[str, Any]:
    """Time every contender on every model at every size of the job; raw numbers and medians. Takes about 40 s."""
    begun = time.perf_counter()
    names = installed((OWN, PEER))
    turns = _take_turns(names, effort)
    return {
        "effort": asdict(effort),
        "models": {name: {"about": MODELS[name].describe(), "units": units_of(name)} for name in effort.models},
        "versions": versions("torch"),
        "not_installed": [name for name in (OWN, PEER) if name not in names],
        "threads_per_process": 1,
        "cores": os.cpu_count(),
        "run_s": time.perf_counter() - begun,
        "medians": [_medians(turns, *cell) for cell in _cells(effort)],
        "turns": [asdict(turn) for turn in turns],
    }


def units_of(model: str) -> int:
    """Modules that are gathered as one, the root among them."""
    return 1 + sum(isinstance(module, UNITS) for module in MODELS[model].model("meta").modules())


def _cells(effort: Effort) -> list[tuple[str, int]]:
    return [(model, ranks) for model in effort.models for ranks, _ in effort.rounds]


def _take_turns(names: Sequence[str], effort: Effort) -> list[Turn]:
    """One process for each contender and size of the job; one of them runs at a time, in random order.

    The contenders of one model and size follow each other, so that a busy moment of the machine hits them alike.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    shuffle = random.Random(effort.seed)
    cells = [(model, ranks) for ranks, rounds in effort.rounds for _ in range(rounds) for model in effort.models]
    with ExitStack() as stack:
        places = [(name, ranks) for ranks, _ in effort.rounds for name in names]
        processes = {place: stack.enter_context(ProcessPoolExecutor(1, spawn)) for place in places}
        for begun in [process.submit(_begin, *place, effort) for place, process in processes.items()]:
            begun.result()
        return [
            processes[name, ranks].submit(_turn, model, effort.steps).result()
            for model, ranks in shuffle.sample(cells, len(cells))
            for name in shuffle.sample(list(names), len(names))
        ]


def _medians(turns: Sequence[Turn], model: str, ranks: int) -> dict[str, Any]:
    """Of one model and size of the job; in seconds, `ratio` between the contenders' turns of one round."""
    of_cell = [turn for turn in turns if (turn.model, turn.ranks) == (model, ranks)]
    by_name = {name: [turn for turn in of_cell if turn.contender == name] for name in (OWN, PEER)}
    plain = [step for turn in of_cell for step in turn.plain]
    return {
        "model": model,
        "ranks": ranks,
        "plain_pass_s": median(step.pass_s for step in plain),
        "plain_update_s": median(step.update_s for step in plain),
        "contenders": {name: _of_contender(own, units_of(model)) for name, own in by_name.items() if own},
        "ratio": ratio(by_name[OWN], by_name[PEER]),
    }


def _of_contender(turns: Sequence[Turn], units: int) -> dict[str, float]:
    above_s = median(turn.above_plain_s() for turn in turns)
    steps = [step for turn in turns for step in turn.sharded]
    return {
        "above_plain_s": above_s,
        "above_plain_s_per_unit": above_s / units,
        "pass_s": median(step.pass_s for step in steps),
        "update_s": median(step.update_s for step in steps),
        "fake_s": median(step.fake_s for step in steps),
    }


def ratio(own: Sequence[Turn], peer: Sequence[Turn]) -> float | None:
    """Median over rounds of the ratio of host times above plain; None if the peer is not installed."""
    pairs = zip(own, peer, strict=True) if peer and own else ()
    return median([a.above_plain_s() / b.above_plain_s() for a, b in pairs]) if peer and own else None


# -- one process -------------------------------------------------------------------------------------------------------


class Plain(Loop):
    """The model without an engine, under the same kind of optimizer."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__(model, case)
        self.model, self.optimizer = model, AdamW(model.parameters(), **HYPERPARAMETERS)


class FakeTime:
    """Counts the seconds inside the fake group: it fills what it gathers by copying this rank's chunk, once a rank."""

    CALLS = ("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base", "allreduce")

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count until the end of this context. Names differ between versions of torch."""
        found = {name: vars(dist.ProcessGroup)[name] for name in self.CALLS if name in vars(dist.ProcessGroup)}
        for name in found:
            setattr(dist.ProcessGroup, name, self._timed(getattr(dist.ProcessGroup, name)))
        try:
            yield
        finally:
            for name, call in found.items():
                setattr(dist.ProcessGroup, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


class Pair:
    """A model twice in this process: plain, and under a contender."""

    def __init__(self, model: str, contender: str) -> None:
        self.name, self.contender, case = model, contender, MODELS[model]
        self.plain = Plain(case.model(), case)
        self.sharded = CONTENDERS[contender].start(case.model(), case)
        self.tokens, self.targets = case.tokens(0, rank=0)

    def steps(self, count: int) -> Turn:
        """`count` steps of each, in turn."""
        fake = FakeTime()
        with fake.counting():
            pairs = [(self._step(self.plain, fake), self._step(self.sharded, fake)) for _ in range(count)]
        plain, sharded = zip(*pairs, strict=True)
        return Turn(self.name, dist.get_world_size(), self.contender, list(plain), list(sharded))

    def _step(self, loop: Loop, fake: FakeTime) -> Step:
        def clock() -> float:
            return time.perf_counter() - fake.seconds

        before_s, begun = fake.seconds, clock()
        loss: Tensor = F.cross_entropy(loop.model(self.tokens).flatten(0, 1), self.targets.flatten())
        loop.backward(loss, True)
        passed = clock()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return Step(passed - begun, clock() - passed, fake.seconds - before_s)


_pairs: dict[str, Pair] = {}  # in a contender's process, by model


def _begin(contender: str, ranks: int, effort: Effort) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for model in effort.models:
        torch.manual_seed(effort.seed)
        _pairs[model] = Pair(model, contender)
        _pairs[model].steps(effort.warmup)


def _turn(model: str, steps: int) -> Turn:
    return _pairs[model].steps(steps)


# -- the report --------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| model | ranks | | host ms per step | host µs per unit | × FSDP2 | plain pass ms | step + zero_grad ms |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for cell in record["medians"]:
        for name, found in cell["contenders"].items():
            times = 1 if name == PEER else cell["ratio"]
            numbers = [
                f"{1e3 * found['above_plain_s']:.1f}",
                f"{1e6 * found['above_plain_s_per_unit']:.0f}",
                "" if times is None else f"{times:.2f}",
                f"{1e3 * cell['plain_pass_s']:.1f}",
                f"{1e3 * found['update_s']:.2f} (plain {1e3 * cell['plain_update_s']:.2f})",
            ]
            lines.append(f"| {cell['model']} | {cell['ranks']} | {name} | {' | '.join(numbers)} |")
    sizes = "; ".join(f"{name}: {about['units']} units, {about['about']}" for name, about in record["models"].items())
    missing = [f"Not installed: {', '.join(record['not_installed'])}."] if record["not_installed"] else []
    return "\n".join([*lines, "", f"{sizes}.", HOW, *missing])


HOW = """Host time is forward and backward less those of the plain model, medians on one thread. The process group is
torch's `fake` one, and its own copies are subtracted. Copies between flat buffers and parameters, which a device would
make, are not: at many ranks FSDP2 pads each tensor to as many rows. A plain step updates all elements, a sharded one
its part."""


def targets(record: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(name, limit, measured) for each target that this decides."""
    return [
        (
            f"host time and copies per unit, {cell['model']}, {cell['ranks']} ranks: `zero3` / FSDP2",
            LIMIT,
            cell["ratio"],
        )
        for cell in record["medians"]
        if cell["ranks"] == LIMIT_RANKS
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    print(table(measure(Effort(models=tuple(parser.parse_args().models)))))


if __name__ == "__main__":
    main()
