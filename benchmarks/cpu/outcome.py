"""What was measured of one contender, and ratios between contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy

from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.rank import Steps

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class Outcome:
    """One contender in one group that took turns: `turns[round][rank]`; bytes are of the worst rank.

    Attributes:
        startup_s: from importing its library to the end of its first step.
        sent_bytes: what a rank hands to others in a step.
        wire_s_per_byte: what the fastest way known needs for a byte, measured beside this group.
    """

    contender: str
    group: int
    turns: list[list[Steps]]
    training_peak_bytes: int
    overall_peak_bytes: int
    startup_s: float = 0.0
    sent_bytes: float = 0.0
    wire_s_per_byte: float | None = None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Outcome:
        """From its JSON form."""
        turns = [[Steps(**steps) for steps in turn] for turn in record["turns"]]
        return cls(**{**record, "turns": turns})

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


def disagreements(outcomes: Sequence[Outcome], tolerance: float) -> list[str]:
    """Contenders whose losses differ from the first one's beyond the tolerance, with the worst difference."""
    training = [outcome for outcome in outcomes if CONTENDERS[outcome.contender].trains]
    found = []
    expected = numpy.array(training[0].losses()) if training else numpy.empty(0)
    for outcome in training[1:]:
        worst = float(numpy.max(numpy.abs(numpy.array(outcome.losses()) / expected - 1)))
        if not worst <= tolerance:
            text = f"losses differ from those of {training[0].contender} by up to {worst:.1e}"
            found.append(f"{outcome.contender}: {text}")
    return found


def ratios(contender: str, baseline: str, outcomes: Sequence[Outcome]) -> list[float]:
    """The ratio of step times within each round of each group in which both met."""
    of_baseline = {outcome.group: outcome.round_s() for outcome in outcomes if outcome.contender == baseline}
    found = []
    for outcome in outcomes:
        if outcome.contender == contender and outcome.group in of_baseline:
            pairs = zip(outcome.round_s(), of_baseline[outcome.group], strict=True)
            found += [own / base for own, base in pairs]
    return found


def ratio(contender: str, baseline: str, outcomes: Sequence[Outcome]) -> float | None:
    """Median of `ratios`; None if they never met."""
    found = ratios(contender, baseline, outcomes)
    return median(found) if found else None


def of_contender(contender: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Its outcomes in all groups."""
    return [outcome for outcome in outcomes if outcome.contender == contender]
