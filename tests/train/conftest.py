"""What tests of runs share."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import terrazzo.train.planning.run_estimate  # noqa: F401  # a function of this name hides the module
from terrazzo.train.data import rendering
from tests.helpers.rendered import BY_FORK
from tests.helpers.untraced import TRACED

PLANNED = sys.modules["terrazzo.train.planning.run_estimate"]
ELSEWHERE = ("checkpoint", "data", "guard", "log", "schedule")
"""Sections that a micro-batch does not depend on, but for whether documents are apart."""
_traced: dict[tuple[Any, ...], Any] = {}


ABOUT_MEMORY = ("test_offload.py", "test_planning.py")
"""Where a run's promise of memory is of the model's own operators; elsewhere it is of formulas."""


@pytest.fixture(autouse=True)
def _templates_are_rendered_by_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "subprocess", BY_FORK)


@pytest.fixture(autouse=True)
def _few_models_are_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch traced, at the end of each run, is a third of what a small run computes. Equal ones are one."""
    trace_of = PLANNED._trace_of

    def remembered(model: Any, config: Any, setup: Any, names: list[str]) -> Any:
        sections = json.loads(config.model_dump_json(exclude=set(ELSEWHERE)))
        sections["train"].pop("steps")
        key = (json.dumps(sections), config.cuts_attention, repr(setup), tuple(names))
        if key not in _traced:
            _traced[key] = trace_of(model, config, setup, names)
        return _traced[key]

    monkeypatch.setattr(PLANNED, "_trace_of", remembered)
    if request.path.name in ABOUT_MEMORY:
        monkeypatch.setenv(TRACED, "1")
    else:
        monkeypatch.setattr(PLANNED, "traced_memory", lambda config, setup: None)
