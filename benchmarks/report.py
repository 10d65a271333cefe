"""From turns to a table and a record."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch

from benchmarks.cases import CASES
from benchmarks.rank import Steps

LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Effort:
    """How much is run: rounds of turns, timed steps per turn, untimed steps before them, and by how many."""

    rounds: int
    steps: int
    warmup: int
    ranks: int
    seed: int
    together: int


@dataclass(frozen=True)
class Outcome:
    """One contender in one group that took turns: `turns[round][rank]`; bytes are of the worst rank."""

    contender: str
    group: int
    turns: list[list[Steps]]
    training_peak_bytes: int
    overall_peak_bytes: int

    def round_s(self) -> list[float]:
        """Per round, the median step, each as long as its slowest rank."""
        by_step = ([rank.wall_s for rank in turn] for turn in self.turns)
        return [median(max(step) for step in zip(*ranks, strict=True)) for ranks in by_step]

    def cpu_s(self) -> float:
        """Median CPU seconds of a step on one rank; barely moved by other load on the machine."""
        return median(seconds for turn in self.turns for rank in turn for seconds in rank.cpu_s)

    def losses(self) -> list[float]:
        """Every timed loss of every rank."""
        return [loss for turn in self.turns for rank in turn for loss in rank.losses]


def disagreements(outcomes: Sequence[Outcome]) -> list[str]:
    """Contenders whose losses differ from the first one's beyond the tolerance, with the worst difference."""
    found = []
    expected = numpy.array(outcomes[0].losses())
    for outcome in outcomes[1:]:
        worst = float(numpy.max(numpy.abs(numpy.array(outcome.losses()) / expected - 1)))
        if not worst <= LOSS_TOLERANCE:
            text = f"losses differ from those of {outcomes[0].contender} by up to {worst:.1e}"
            found.append(f"{outcome.contender}: {text}")
    return found


def ratio(contender: str, baseline: str, outcomes: Sequence[Outcome]) -> float:
    """Median over rounds of the ratio of step times within one round of one group."""
    of_baseline = {outcome.group: outcome.round_s() for outcome in outcomes if outcome.contender == baseline}
    ratios = []
    for outcome in outcomes:
        if outcome.contender == contender and outcome.group in of_baseline:
            pairs = zip(outcome.round_s(), of_baseline[outcome.group], strict=True)
            ratios += [own / base for own, base in pairs]
    return median(ratios)


def table(outcomes: Sequence[Outcome], baselines: Sequence[str]) -> str:
    """Markdown, one row per contender."""
    ratio_heads = [f"× {name}" for name in baselines]
    head = ["", *ratio_heads, "step ms", "min to max", "CPU ms", "training peak MB", "overall peak MB"]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name in dict.fromkeys(outcome.contender for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.contender == name]
        times_ms = [1e3 * seconds for outcome in own for seconds in outcome.round_s()]
        ratios = [f"{ratio(name, base, outcomes):.2f}" for base in baselines]
        spread = f"{min(times_ms):.0f} to {max(times_ms):.0f}"
        cpu_ms = 1e3 * median(outcome.cpu_s() for outcome in own)
        peaks = [median(o.training_peak_bytes for o in own), median(o.overall_peak_bytes for o in own)]
        times = [f"{median(times_ms):.0f}", spread, f"{cpu_ms:.0f}"]
        rows.append([name, *ratios, *times, *(f"{peak / 1e6:.0f}" for peak in peaks)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown(case: str, effort: Effort, outcomes: Sequence[Outcome], baselines: Sequence[str], command: str) -> str:
    """The table with what a reader needs to judge and repeat it."""
    return f"""# {case}

{CASES[case].describe()}.
{effort.ranks} gloo ranks on one machine, one thread each, fp32, fused AdamW; torch {torch.__version__},
Python {platform.python_version()}, {_processor()}, {date.today()}.

{table(outcomes, baselines)}

Every contender has processes of its own; up to {effort.together} contenders, the baselines always among them,
are alive at once and take turns in random order: {effort.rounds} rounds of {effort.steps} steps, after
{effort.warmup} steps of warm-up. A step lasts from a barrier to the end of the slowest rank's update. Times
are medians, spreads are of the rounds' medians, ratios are medians of the ratios within each round. Peaks
are resident memory of one rank above the same process before it built its model: "training" is what later
steps use, "overall" counts the building of the model and what malloc keeps of freed memory. The losses of
all contenders agree within {LOSS_TOLERANCE:.0e}.

    {command}
"""


def record(case: str, effort: Effort, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """Everything measured, for JSON."""
    return {
        "case": {"name": case, **asdict(CASES[case])},
        "effort": asdict(effort),
        "command": command,
        "date": str(date.today()),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "processor": _processor(),
        "threads_per_rank": 1,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def write(folder: Path, case: str, text: str, data: dict[str, Any]) -> None:
    """`CASE.md` and `CASE.json` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case}.md").write_text(text)
    (folder / f"{case}.json").write_text(json.dumps(data) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores visible)" if names else platform.processor()
