"""Time Terrazzo and its peers on the same model, seed and data, interleaved in one run.

python -m benchmarks.compare --case traffic
python -m benchmarks.compare --case tiny --contenders ddp,fsdp2 --rounds 2
"""

from __future__ import annotations

import random
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.block import Block, Effort, measure
from benchmarks.cases import CASES
from benchmarks.contenders import CONTENDERS
from benchmarks.report import disagreements, markdown, record, write

Option = typer.Option


def main(  # structure: signature fixed by the command line, one argument per option
    case: Annotated[list[str], Option(help=f"one or more of: {', '.join(CASES)}")] = ["traffic", "compute"],  # noqa: B006
    contenders: Annotated[str, Option(help="comma-separated")] = ",".join(CONTENDERS),
    baselines: Annotated[str, Option(help="whose step time others are divided by")] = "ddp,fsdp2",
    rounds: Annotated[int, Option(help="every contender runs once in each")] = 5,
    ranks: int = 2,
    warmup: Annotated[int, Option(help="untimed steps per block")] = 2,
    steps: Annotated[int, Option(help="timed steps per block")] = 5,
    seed: int = 0,
    out: Annotated[Path, Option(help="folder for the table and the record")] = Path("benchmarks/out"),
) -> None:
    """Compare step time and peak memory; the table is printed and kept with all raw numbers."""
    names = _chosen(contenders.split(","), CONTENDERS, "contender")
    bases = [name for name in _chosen(baselines.split(","), CONTENDERS, "baseline") if name in names]
    effort = Effort(ranks, warmup, steps, seed)
    command = shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]])
    for name in _chosen(case, CASES, "case"):
        results = run(name, names, rounds, effort)
        if problems := disagreements(results, names[0]):
            raise SystemExit("Nothing is reported, because not all trained the same:\n" + "\n".join(problems))
        text = markdown(name, effort, results, bases, command)
        write(out, name, text, record(name, effort, results, command))
        print(text, flush=True)


def run(case: str, names: list[str], rounds: int, effort: Effort) -> list[dict[str, Block]]:
    """All blocks of one case, in an order that is shuffled anew in each round."""
    shuffle = random.Random(effort.seed)
    results = []
    for number in range(1, rounds + 1):
        blocks = {}
        for name in shuffle.sample(names, len(names)):
            begin = time.perf_counter()
            block = blocks[name] = measure(case, name, effort)
            spent_s = time.perf_counter() - begin
            progress = f"{case} round {number}/{rounds} {name}: {1e3 * block.median_s:.1f} ms per step"
            print(f"{progress} (block of {spent_s:.0f} s)", file=sys.stderr, flush=True)
        results.append({name: blocks[name] for name in names})
    return results


def _chosen(wanted: list[str], known: Iterable[str], kind: str) -> list[str]:
    names = list(known)
    if unknown := [name for name in wanted if name not in names]:
        raise typer.BadParameter(f"no {kind} is called {', '.join(unknown)}; there are: {', '.join(names)}")
    return wanted


if __name__ == "__main__":
    typer.run(main)
