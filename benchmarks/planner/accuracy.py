"""The accuracy of the planner, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.planner import baseline
from benchmarks.planner.anchors import ANCHORS
from benchmarks.planner.evaluate import Outcome, Summary, by_family, summary, sweeps
from benchmarks.planner.exact import checks, feasibility
from benchmarks.planner.readings import results
from benchmarks.planner.refit import held_out_medians
from benchmarks.planner.rows import Row, unusable

__all__ = ["COMMAND", "TARGETS", "record", "worst"]

COMMAND = "python -m benchmarks.planner"

TARGETS = {"memory_median": 0.08, "memory_p90": 0.30, "above_upper": 0.03, "step_median": 0.08, "regret": 0.10}
"""What was aimed at: relative errors, and shares."""

SMALL_BYTES = 5e9
LARGE_BYTES = 20e9
"""Peaks in which what lies around the tensors hardly counts."""


def record(found: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that the report says."""
    return {
        "command": COMMAND,
        "rows": {"used": len(found), "unusable": dict(Counter(unusable().values()))},
        "exact": [vars(check) | {"holds": check.holds} for check in checks()],
        "memory": _memory(found),
        "feasibility": _feasibility(found),
        "step": _step(found),
        "refitted": held_out_medians([outcome.row for outcome in found]),
        "readings": [vars(result) for result in results([outcome.row for outcome in found])],
        "ranking": _ranking(found),
        "anchors": _anchors(),
    }


def worst(found: Sequence[Outcome], count: int = 10) -> str:
    """The rows that are furthest off, for whoever looks for the reason."""
    memory = sorted((o for o in found if o.row.memory_bytes), key=lambda o: -abs(o.memory_error))[:count]
    time = sorted((o for o in found if o.row.step_s and o.time), key=lambda o: -abs(o.step_error))[:count]
    lines = [f"{o.row.id}: memory {o.memory_error:+.0%}, {_what(o.row)}" for o in memory]
    return "\n".join(lines + [f"{o.row.id}: step {o.step_error:+.0%}, {_what(o.row)}" for o in time])


def _memory(found: Sequence[Outcome]) -> dict[str, Any]:
    families = by_family(found, lambda outcome: outcome.row.memory_bytes is not None)
    every = [outcome for group in families.values() for outcome in group]
    return {
        "all": _errors([o.memory_error for o in every]) | {"above_upper": _share(o.above_upper for o in every)},
        "upper_over_measured": _headroom(every),
        "small": sum((o.row.memory_bytes or 0) < SMALL_BYTES for o in every),
        "upper_over_large": _headroom([o for o in every if (o.row.memory_bytes or 0) > LARGE_BYTES]),
        "families": {
            name: _errors([o.memory_error for o in group]) | {"above_upper": _share(o.above_upper for o in group)}
            for name, group in families.items()
        },
    }


def _headroom(group: Sequence[Outcome]) -> float:
    """Upper bound over measurement, in the median."""
    return median(o.memory.upper_bytes / (o.row.memory_bytes or 1) for o in group)


def _feasibility(found: Sequence[Outcome]) -> dict[str, Any]:
    ran = [outcome for outcome in found if outcome.row.quality in "AB"]
    return {
        "ran": len(ran),
        "said_not_to_fit": _share(outcome.memory.fits is False for outcome in ran),
        "refused_as_impossible": sum(bool(outcome.refused) for outcome in ran),
        "verdicts": [vars(verdict) | {"holds": verdict.holds} for verdict in feasibility()],
    }


def _step(found: Sequence[Outcome]) -> dict[str, Any]:
    families = by_family(found, lambda outcome: outcome.row.step_s is not None and outcome.time is not None)
    measured = [outcome.row for group in families.values() for outcome in group]
    table = {name: _family_step(name, group, measured) for name, group in families.items()}
    graded = [o for group in families.values() for o in group if o.row.quality in "AB"]
    return {
        "all": _errors([o.step_error for o in graded]),
        "median_of_families": median(line["median"] for name, line in table.items() if name != "jzv100"),
        "families": table,
        "without_time": sum(o.row.step_s is not None and o.time is None for o in found),
    }


def _family_step(name: str, group: Sequence[Outcome], measured: Sequence[Row]) -> dict[str, Any]:
    own = baseline.constants(outcome.row for outcome in group)
    other = baseline.held_out(measured, name)
    rivals = {"held_out": other, "in_sample": own}
    return _errors([o.step_error for o in group]) | {
        f"baseline_{label}": median(
            abs((baseline.step_s(o.row.setup, constants) or 0.0) / (o.row.step_s or 1) - 1) for o in group
        )
        for label, constants in rivals.items()
    }


def _ranking(found: Sequence[Outcome]) -> dict[str, Any]:
    groups = sweeps(found)
    families = {
        name: [s.regret for s in groups if s.family == name] for name in dict.fromkeys(s.family for s in groups)
    }
    return {
        name: {
            "sweeps": len(regrets),
            "within": _share(regret <= TARGETS["regret"] for regret in regrets),
            "median": median(regrets),
            "worst": max(regrets),
        }
        for name, regrets in families.items()
    }


def _anchors() -> list[dict[str, Any]]:
    lines = []
    for anchor in ANCHORS:
        value = anchor.predict()
        lines.append(
            {"name": anchor.name, "unit": anchor.unit, "published": anchor.published, "predicted": value}
            | {"error": anchor.error(value), "source": anchor.source}
            | ({"above_upper": anchor.published[1] > anchor.bound()} if anchor.bound else {})
        )
    return lines


def _errors(errors: Sequence[float]) -> dict[str, Any]:
    return vars(summary(errors)) if errors else vars(Summary(0, 0.0, 0.0, 0.0))


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def _what(row: Row) -> str:
    setup = row.setup
    mesh = setup.mesh
    return (
        f"{setup.model.name} {setup.model.numel / 1e9:.3g}B {setup.cluster.count} x {setup.cluster.device.name} "
        f"tp{mesh.tp} pp{mesh.pp} cp{mesh.cp} dp{mesh.batch_ranks} {setup.plan.name} v{setup.virtual_stages} "
        f"seq {setup.sequence} mb {setup.micro_batch} x {setup.micro_batches} ac {setup.checkpointing} "
        f"{setup.attention} {setup.matmul}"
    )
