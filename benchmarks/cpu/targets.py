"""What the project wants to reach, and what a record says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cpu.outcome import Outcome, of_contender, ratio

Cases = Mapping[str, Sequence[Outcome]]
"""Outcomes by the name of the run."""

PEERS = {
    "zero0": ["ddp", "deepspeed-0"],
    "zero1": ["zero-redundancy", "deepspeed-1"],
    "zero2": ["zero-redundancy", "deepspeed-2"],
    "zero3": ["fsdp2", "fsdp1", "deepspeed-3"],
}


TENSOR = ("terrazzo-zero3-tensor", "fsdp2-tensor")
FULLY = "fsdp2-stages"
EXPERTS = ("terrazzo-zero3-experts", "fsdp2-experts")
SEQUENCES = ("terrazzo-zero3-ulysses", "deepspeed-3-ulysses")


@dataclass(frozen=True)
class Target:
    """A ratio that should be at most `limit`; `value` finds it, or None where it was not measured."""

    name: str
    limit: float
    value: Callable[[Cases], float | None]


def _time(case: str, own: str, peer: str) -> Callable[[Cases], float | None]:
    return lambda cases: ratio(own, peer, cases.get(case, []))


def _peak(case: str, own: str, peers: Sequence[str]) -> Callable[[Cases], float | None]:
    def value(cases: Cases) -> float | None:
        smallest = [_peak_bytes(peer, cases.get(case, [])) for peer in peers]
        mine = _peak_bytes(own, cases.get(case, []))
        known = [peak for peak in smallest if peak]
        return mine / min(known) if mine and known else None

    return value


def _peak_bytes(contender: str, outcomes: Sequence[Outcome]) -> float | None:
    peaks = [outcome.training_peak_bytes for outcome in of_contender(contender, outcomes)]
    return median(peaks) if peaks else None


def _best_peer(case: str, plan: str) -> Callable[[Cases], float | None]:
    """Against that peer of the same stage which is fastest: the largest of the ratios."""

    def value(cases: Cases) -> float | None:
        found = [ratio(f"terrazzo-{plan}", peer, cases.get(case, [])) for peer in PEERS[plan]]
        return max((r for r in found if r is not None), default=None)

    return value


def _startup(case: str, own: str, peer: str) -> Callable[[Cases], float | None]:
    def value(cases: Cases) -> float | None:
        mine, its = ([o.startup_s for o in of_contender(n, cases.get(case, []))] for n in (own, peer))
        return median(mine) / median(its) if mine and its else None

    return value


def of_floor(case: str, plan: str) -> Callable[[Cases], float | None]:
    """Against compute alone, or against moving the plan's bytes at the measured bandwidth: the smaller ratio."""

    def value(cases: Cases) -> float | None:
        outcomes, own = cases.get(case, []), f"terrazzo-{plan}"
        to_compute = ratio(own, "alone", outcomes)
        wire = [o.wire_s_per_byte for o in outcomes if o.wire_s_per_byte is not None]
        if to_compute is None or not wire:
            return None
        mine = of_contender(own, outcomes)
        bytes_s = median(o.sent_bytes for o in mine) * median(wire)
        return min(to_compute, median(second for o in mine for second in o.round_s()) / bytes_s)

    return value


TARGETS = [
    Target("traffic, 2 ranks: `zero3` / FSDP2", 0.45, _time("traffic", "terrazzo-zero3", "fsdp2")),
    Target("traffic, 2 ranks: `zero3` / DeepSpeed 3", 0.50, _time("traffic", "terrazzo-zero3", "deepspeed-3")),
    Target("traffic, 4 ranks: `zero3` / FSDP2", 0.40, _time("traffic-4", "terrazzo-zero3", "fsdp2")),
    Target("traffic: `zero1` / ZeroRedundancy", 0.85, _time("traffic", "terrazzo-zero1", "zero-redundancy")),
    Target("traffic: `zero2` / ZeroRedundancy", 0.85, _time("traffic", "terrazzo-zero2", "zero-redundancy")),
    Target("traffic: `zero1` / DeepSpeed 1", 0.55, _time("traffic", "terrazzo-zero1", "deepspeed-1")),
    Target("traffic: `zero2` / DeepSpeed 2", 0.55, _time("traffic", "terrazzo-zero2", "deepspeed-2")),
    Target("traffic: `zero0` / DDP", 1.00, _time("traffic", "terrazzo-zero0", "ddp")),
    *(Target(f"compute: `{plan}` / best peer", 1.00, _best_peer("compute", plan)) for plan in PEERS),
    Target("traffic: `zero3` / its floor", 1.25, of_floor("traffic", "zero3")),
    Target("accumulate: `zero2` / DeepSpeed 2", 0.50, _time("accumulate", "terrazzo-zero2", "deepspeed-2")),
    Target("experts: `zero3` / FSDP2, time", 0.50, _time("experts", "terrazzo-zero3", "fsdp2")),
    Target("experts: `zero3` / FSDP2, peak", 0.60, _peak("experts", "terrazzo-zero3", ["fsdp2"])),
    Target("lora: `zero3` / FSDP2, time", 0.50, _time("lora", "terrazzo-zero3", "fsdp2")),
    Target("lora: `zero3` / FSDP2, peak", 0.60, _peak("lora", "terrazzo-zero3", ["fsdp2"])),
    *(
        Target(f"traffic: `{plan}` / smallest peer, peak", 1.00, _peak("traffic", f"terrazzo-{plan}", peers))
        for plan, peers in PEERS.items()
    ),
    Target("traffic: `zero3` / FSDP2, start", 1.00, _startup("traffic", "terrazzo-zero3", "fsdp2")),
    Target("traffic: `zero3` / DeepSpeed 3, start", 0.50, _startup("traffic", "terrazzo-zero3", "deepspeed-3")),
]


AXES = [
    Target("small matrices: `zero3`, tp / FSDP2, DTensor", 0.80, _time("matrices-small-4", *TENSOR)),
    Target("large matrices: `zero3`, tp / FSDP2, DTensor", 0.95, _time("matrices-large-4", *TENSOR)),
    Target("large matrices: the same, peak", 1.00, _peak("matrices-large-4", TENSOR[0], TENSOR[1:])),
    Target("long sequences: `zero3`, `ulysses` / DeepSpeed 3, Ulysses", 0.70, _time("sequences", *SEQUENCES)),
    Target("wide, short sequences: the same", 0.70, _time("sequences-wide", *SEQUENCES)),
    Target("long sequences: the same, peak", 1.00, _peak("sequences", SEQUENCES[0], SEQUENCES[1:])),
]
"""Where ranks share matrices or sequences."""


PIPELINES = [
    Target("2 ranks: `zero0`, pp / torch's 1F1B", 1.05, _time("stages", "terrazzo-zero0-stages", "torch-stages")),
    Target("2 ranks: the same, zero_bubble", 1.00, _time("stages", "terrazzo-zero0-zero_bubble", "torch-stages")),
    *(
        Target(f"4 ranks: `{plan}`, pp / FSDP2, 1F1B", 1.00, _time("stages-4", f"terrazzo-{plan}-stages", FULLY))
        for plan in ("zero2", "zero3", "shard_grad_op")
    ),
    Target("2 ranks: `zero0`, pp / DeepSpeed's", 0.80, _time("stages", "terrazzo-zero0-stages", "deepspeed-0-stages")),
    Target(
        "4 ranks: `zero1`, pp / DeepSpeed's, stage 1",
        0.80,
        _time("stages-4", "terrazzo-zero1-stages", "deepspeed-1-stages"),
    ),
    Target("4 ranks: `zero3`, the same, peak", 1.00, _peak("stages-4", "terrazzo-zero3-stages", [FULLY])),
]
"""Where ranks have other layers."""

MIXTURE = [
    *(
        Target(f"{case}: `zero3`, ep / transformers' FSDP2, ep", 0.80, _time(case, *EXPERTS))
        for case in ("mixture-small", "mixture", "mixture-4")
    ),
    Target("mixture: the same, peak", 1.00, _peak("mixture", EXPERTS[0], EXPERTS[1:])),
]
"""Where ranks share experts."""

OF_SUITE = {"axes": AXES, "stages": PIPELINES, "mixture": MIXTURE}
"""Of suites that have their own."""


def table(
    cases: Cases, further: Sequence[tuple[str, float, float | None]] = (), targets: Sequence[Target] = TARGETS
) -> str:
    """Markdown: target, limit, measured, whether it is met.

    Args:
        further: (name, limit, value) of targets that other measurements decide.
    """
    rows = [(target.name, target.limit, target.value(cases)) for target in targets] + list(further)
    lines = ["| target | limit | measured | |", "|---|--:|--:|---|"]
    for name, limit, value in rows:
        shown = "not measured" if value is None else f"{value:.2f}"
        verdict = "" if value is None else "met" if round(value, 2) <= limit else "**missed**"
        lines.append(f"| {name} | {limit:.2f} | {shown} | {verdict} |")
    return "\n".join(lines)
