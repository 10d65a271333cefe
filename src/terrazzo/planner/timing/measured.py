"""What a measurement on a device changes in the time of a step, and how one is fitted to steps that were timed.

Where the device's figures are known, a measurement corrects them: computation takes `pace` times as long, collectives
what their bandwidth says if it was measured, and a step has a constant more. Everything else (bubble, overlap, copies
to host and disk) follows from that as without it. Where no figures are known, a rate and that constant must do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from terrazzo.planner.figures import Formula, Term, TrafficFigures
from terrazzo.planner.machine.transfers import Link
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.calibration import Calibration
from terrazzo.planner.timing.compute import step_flops
from terrazzo.planner.timing.core_turns import step_terms
from terrazzo.planner.timing.pipeline_step import PipelineStep, bubble_of_equal_stages
from terrazzo.planner.timing.rates import copy_s

__all__ = ["FORMULAS", "computation_s", "copied_bytes", "fitted_pace", "line_terms", "measured_step", "measured_terms"]

FORMULAS = {
    "time.measured": Formula("flops / flops_per_s", "measured on this device"),
    "time.waited": Formula("bytes / bandwidth; bytes that collectives send", "measured on this device"),
    "time.overhead": Formula("overhead_s; of a step, whatever its number of tokens", "measured on this device"),
    "time.offload": Formula(
        "pcie_s + disk_s; bytes / bandwidth, of copies that nothing hides", "ZeRO-Infinity, arXiv 2104.07857"
    ),
}

COMPUTATION = ("time.matmul", "time.attention", "time.memory", "time.recompute", "time.launch")

FASTEST, SLOWEST = 0.05, 1000.0
"""Paces between which one is sought."""


def computation_s(setup: Setup) -> float:
    """Seconds of a step in which the device computes that computes longest, by its figures."""
    ranks = set(PipelineStep(setup).ranks)
    return max(sum(term.value for term in rank.pass_terms() if term.formula in COMPUTATION) for rank in ranks)


def measured_step(setup: Setup, record: Calibration) -> PipelineStep:
    """All ranks along pp, at the pace that was measured."""
    pace = record.pace or step_flops(setup) / record.flops_per_s / computation_s(setup)
    return PipelineStep(setup, pace, waits=record.bandwidth is None)


def measured_terms(step: PipelineStep, traffic: TrafficFigures, record: Calibration) -> list[Term]:
    """The terms of a `measured_step`, and what was measured as a whole."""
    return [*step_terms(step), *_waits(traffic, record), *_overhead(record)]


def line_terms(setup: Setup, traffic: TrafficFigures, record: Calibration) -> list[Term]:
    """The terms on a device without known figures: FLOPs at the measured rate, and copies at their links' rates."""
    flops, copied = step_flops(setup), copied_bytes(setup, traffic)
    busy = flops / record.flops_per_s
    terms = [Term.seconds("computation", busy, "time.measured", flops=flops, flops_per_s=record.flops_per_s)]
    terms += [*_overhead(record), *_waits(traffic, record)]
    if setup.mesh.pp > 1:
        terms.append(bubble_of_equal_stages(setup, busy))
    if copied:
        spent = {"pcie_s": 0.0, "disk_s": 0.0}
        spent |= {f"{link}_s": copy_s(setup.cluster, link, sent) for link, sent in copied.items()}
        value = sum(spent.values())
        terms.append(Term.seconds("copies to host and disk", value, "time.offload", **spent))
    return terms


def copied_bytes(setup: Setup, traffic: TrafficFigures) -> dict[Link, float]:
    """Bytes of copies to and from host and disk by link; on a CPU there is no way to the host."""
    copied: dict[Link, float] = {}
    for term in traffic.collectives:
        if term.purpose == "offload":
            for link, sent in term.links.items():
                copied[link] = copied.get(link, 0.0) + sent
    here = (Link.DISK,) if setup.cluster.device.kind == "cpu" else (Link.PCIE, Link.DISK)
    return {link: sent for link, sent in copied.items() if sent and link in here}


def _waits(traffic: TrafficFigures, record: Calibration) -> list[Term]:
    sent = sum(term.value for term in traffic.collectives if term.purpose != "offload")
    if not record.bandwidth or not sent:
        return []
    waited, inputs = sent / record.bandwidth, {"bytes": sent, "bandwidth": record.bandwidth}
    return [Term.seconds("communication", waited, "time.waited", **inputs)]


def _overhead(record: Calibration) -> list[Term]:
    constant = record.overhead_s
    return [Term.seconds("overhead", constant, "time.overhead", overhead_s=constant)] if constant else []


# -- fitting ---------------------------------------------------------------------------------------------------


class FittedPace(NamedTuple):
    """How many times as long computation takes as the device's figures say, and seconds of any step beside it."""

    pace: float
    overhead_s: float


def fitted_pace(setups: Sequence[Setup], seconds: Sequence[float], waits: bool) -> FittedPace:
    """Pace and constant of steps that were timed.

    They follow from the difference between the first and the last, or, where it does not tell, from the first alone,
    with no constant.

    Args:
        setups: of one model and plan, the last with less work.
        waits: whether the seconds hold those of waiting for collectives.
    """

    def expected(setup: Setup, pace: float) -> float:
        return sum(term.value for term in step_terms(PipelineStep(setup, pace, waits)))

    first, last = setups[0], setups[-1]
    less = seconds[0] - seconds[-1]
    if less > 0:
        pace = _solved(lambda pace: expected(first, pace) - expected(last, pace), less)
        constant = seconds[0] - expected(first, pace)
        if constant >= 0 and SLOWEST > pace > FASTEST:
            return FittedPace(pace, constant)
    return FittedPace(_solved(lambda pace: expected(first, pace), seconds[0]), 0.0)


def _solved(rising: Callable[[float], float], wanted: float) -> float:
    """Where a function of the pace reaches a value, by bisection; an end where it does not."""
    low, high = FASTEST, SLOWEST
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high
