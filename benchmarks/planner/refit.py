"""What the planner would say of a family if its constants had been set without that family.

Each constant that was set on published rows is moved again, one after the other over a coarse grid around its value,
to where the other families are met best. A constant that those say nothing about stays where it was. This shows how
much a family owes to having been looked at; it does not undo the choice of the formulas.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from types import ModuleType

from benchmarks.planner.rows import Row
from terrazzo.planner.timing.step import time_of

__all__ = ["CONSTANTS", "held_out_medians"]

CONSTANTS: tuple[str, ...] = (
    "SUSTAINED_SHARE",
    "SUSTAINED_POWER",
    "MEMORY_SHARE",
    "LAUNCH_S",
    "COMPILED_LAUNCH",
    "SCORE_BYTES",
    "LOGIT_BYTES",
    "CONTENTION",
    "TENSOR_HIDDEN",
)
"""Module constants of the planner's timing that were set on published rows."""

OF_THE_HOST = ("LAUNCH_S", "COMPILED_LAUNCH")
"""The constants that are figures of the host and its software: no family says anything about another's."""

FACTORS = (0.6, 0.75, 0.87, 0.94, 1.06, 1.15, 1.33, 1.67)
ROUNDS = 2
MOST_ROWS = 60
"""Rows of one family while fitting, evenly spread; errors are taken over all of its rows."""
FULL_WEIGHT = 12

ORDER = "terrazzo.planner.timing.timeline"
"""The module whose cache stays when a constant is moved: in which order stages run is of their schedule alone. All else
of a pipeline's step is quickly computed again.
"""


def held_out_medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median error of each family with the constants as they are, and with those refitted on all other families.

    `own_host` is the error refitted, with what the host takes to launch kernels left as it is.
    """
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.step_s and row.quality in "AB":
            families[row.family].append(row)
    found, misfits = {}, _Misfits({name: thin(group) for name, group in families.items()})
    for name, group in families.items():
        factors = _fit(misfits, tuple(other for other in families if other != name))
        with scaled(factors):
            refitted = _median_error(group)
        with scaled(factors | dict.fromkeys(OF_THE_HOST, 1.0)):
            own_host = _median_error(group)
        found[name] = {"shipped": _median_error(group), "refitted": refitted, "own_host": own_host} | factors
    return found


def thin(rows: Sequence[Row]) -> list[Row]:
    """At most `MOST_ROWS` of them."""
    return list(rows[:: -(-len(rows) // MOST_ROWS)])


@contextmanager
def scaled(factors: Mapping[str, float]) -> Iterator[None]:
    """The planner with each named constant multiplied, wherever it was imported, until the block ends."""
    modules = [module for name, module in sys.modules.items() if name.startswith("terrazzo.planner.")]
    holders = [(module, name) for module in modules for name in factors if name in vars(module)]
    assert {name for _, name in holders} == set(factors), "a constant was renamed"
    assert all(module.__name__ != ORDER for module, _ in holders), "what is kept would be of another constant"
    before = [(module, name, vars(module)[name]) for module, name in holders]
    for module, name, value in before:
        setattr(module, name, value * factors[name])
    _forget(modules)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        _forget(modules)


def _forget(modules: Sequence[ModuleType]) -> None:
    for module in modules:
        if module.__name__ == ORDER:
            continue
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


class _Misfits:
    """How far the planner is from each family under some factors; each asked once, since the fits that leave one family
    out or another try much alike.
    """

    def __init__(self, families: Mapping[str, Sequence[Row]]) -> None:
        self.families = families
        self._known: dict[tuple[float, ...], dict[str, float]] = {}

    def loss(self, names: Sequence[str], factors: Mapping[str, float]) -> float:
        """Mean over families of the median of |log(planner / measured)|; those of a few rows count for less."""
        known = self._known.setdefault(tuple(factors.values()), {})
        if missing := [name for name in names if name not in known]:
            with scaled(factors):
                known |= {name: _misfit(self.families[name]) for name in missing}
        weights = {name: min(len(self.families[name]), FULL_WEIGHT) for name in names}
        return sum(weights[name] * known[name] for name in names) / sum(weights.values())


def _fit(misfits: _Misfits, names: Sequence[str]) -> dict[str, float]:
    best = dict.fromkeys(CONSTANTS, 1.0)
    least = misfits.loss(names, best)
    for _ in range(ROUNDS):
        for name in CONSTANTS:
            for factor in FACTORS:
                trial = best | {name: best[name] * factor}
                if (loss := misfits.loss(names, trial)) < least - 1e-4:
                    best, least = trial, loss
    return best


def _misfit(rows: Sequence[Row]) -> float:
    return median(abs(math.log(_ratio(row))) for row in rows)


def _median_error(rows: Sequence[Row]) -> float:
    return median(abs(_ratio(row) - 1) for row in rows)


def _ratio(row: Row) -> float:
    time = time_of(replace(row.setup))  # a copy remembers nothing of other constants
    assert not isinstance(time, str), time
    assert row.step_s
    return time.step_s / row.step_s
