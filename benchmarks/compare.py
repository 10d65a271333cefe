"""Time Terrazzo and its peers on the same model, seed and data, their steps interleaved in one run.

python -m benchmarks.compare --case traffic
python -m benchmarks.compare --case tiny --contenders ddp,fsdp2,fsdp1 --rounds 2
"""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases import CASES
from benchmarks.contenders import CONTENDERS
from benchmarks.gang import Gang
from benchmarks.rank import Steps
from benchmarks.report import Effort, Outcome, disagreements, markdown, record, write

MEMORY_STEPS = 2
Option = typer.Option


def main(  # structure: signature fixed by the command line, one argument per option
    case: Annotated[str, Option(help=f"comma-separated, of: {', '.join(CASES)}")] = "traffic,compute",
    contenders: Annotated[str, Option(help=f"comma-separated, of: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    baselines: Annotated[str, Option(help="whose step time others are divided by")] = "ddp,fsdp2",
    rounds: Annotated[int, Option(help="turns of each contender")] = 5,
    steps: Annotated[int, Option(help="timed steps per turn")] = 2,
    warmup: Annotated[int, Option(help="untimed steps before the first turn")] = 2,
    together: Annotated[int, Option(help="contenders alive at once, baselines included")] = 4,
    ranks: int = 2,
    seed: int = 0,
    out: Annotated[Path, Option(help="folder for the table and the record")] = Path("benchmarks/out"),
) -> None:
    """Compare step time and peak memory; the table is printed and kept with all raw numbers."""
    names = _chosen(contenders, CONTENDERS, "contender")
    bases = [name for name in _chosen(baselines, CONTENDERS, "baseline") if name in names]
    effort = Effort(rounds, steps, warmup, ranks, seed, together)
    command = shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]])
    for name in _chosen(case, CASES, "case"):
        groups = list(grouped(names, bases, together))
        outcomes = [found for n, group in enumerate(groups) for found in take_turns(name, n, group, effort)]
        if problems := disagreements(outcomes):
            raise SystemExit("Nothing is reported, because not all trained the same:\n" + "\n".join(problems))
        text = markdown(name, effort, outcomes, bases, command)
        write(out, name, text, record(name, effort, outcomes, command))
        print(text, flush=True)


def grouped(names: list[str], baselines: list[str], together: int) -> Iterator[list[str]]:
    """Groups of at most `together` names, every one with all baselines in it."""
    others = [name for name in names if name not in baselines]
    size = max(1, together - len(baselines))
    for first in range(0, max(1, len(others)), size):
        yield baselines + others[first : first + size]


def take_turns(case: str, number: int, group: list[str], effort: Effort) -> list[Outcome]:
    """Start the contenders of one group and let them step in turn, in an order shuffled for each round."""
    shuffle = random.Random(effort.seed)
    turns: dict[str, list[list[Steps]]] = {name: [] for name in group}
    with ExitStack() as stack:
        gangs = {}
        for name in group:
            _progress(f"{case}: starting {name}")
            gangs[name] = stack.enter_context(Gang(case, name, effort.ranks, effort.seed))
            gangs[name].steps(effort.warmup)
        for round_number in range(1, effort.rounds + 1):
            for name in shuffle.sample(group, len(group)):
                turns[name].append(gangs[name].steps(effort.steps))
                step_ms = 1e3 * max(rank.wall_s[-1] for rank in turns[name][-1])
                _progress(f"{case}: round {round_number} of {effort.rounds}, {name}: {step_ms:.0f} ms")
        overall = {name: gang.overall_peak_bytes() for name, gang in gangs.items()}
        training = {name: gang.training_peak_bytes(MEMORY_STEPS) for name, gang in gangs.items()}
    return [Outcome(name, number, turns[name], training[name], overall[name]) for name in group]


def _chosen(wanted: str, known: Iterable[str], kind: str) -> list[str]:
    names = list(known)
    if unknown := [name for name in wanted.split(",") if name not in names]:
        raise typer.BadParameter(f"no {kind} is called {', '.join(unknown)}; there are: {', '.join(names)}")
    return wanted.split(",")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
