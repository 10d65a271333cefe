"""The work of planning grows with the model, not with its square. Work is counted, not timed."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import partition
from terrazzo.engine.sharding.shard import estimate
from tests.helpers.fake import fake_group


class Few(nn.Module):
    """A block of a few parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        for index in range(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(3, device="meta")))

    def forward(self) -> None:
        """Never called."""

    def reset_parameters(self) -> None:
        """Never called: nothing is allocated here."""


def blocks(units: int, parameters: int = 1) -> nn.Module:
    return nn.Sequential(*(Few(parameters) for _ in range(units)))


class CountedName(str):
    """A name that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedName.lookups += 1
        return str.__hash__(self)


def test_looking_for_owners_is_linear_in_units() -> None:
    def lookups(units: int) -> int:
        names = [CountedName(index) for index in range(units)]
        model = blocks(units)
        CountedName.lookups = 0
        assert len(partition(model, names)) == units
        return CountedName.lookups

    assert lookups(2000) < 5 * lookups(500)


def calls(function: Callable[[], Any]) -> int:
    """Calls that `function` makes, of Python's functions and of C's."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero3", "zero2@cpu"])
@pytest.mark.parametrize(("units", "parameters"), [(100, 1), (4, 50)])
def test_an_estimate_is_linear_in_units_and_in_parameters(plan: str, units: int, parameters: int) -> None:
    def calls_for(units: int, parameters: int, groups: int) -> int:
        model = blocks(units, parameters)
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": weights[index::groups]} for index in range(groups)])
        return calls(lambda: estimate(model, optimizer, plan, units=[Few]))

    with fake_group(8):
        calls_for(2, 2, 2)  # whatever happens only once
        small = calls_for(units, parameters, 3)
        assert calls_for(4 * units, parameters, 3) < 5 * small
        assert calls_for(units, 4 * parameters, 3) < 5 * small


def test_names_given_one_by_one_are_found_in_linear_time() -> None:
    def calls_for(units: int) -> int:
        model = blocks(units)
        names = [glob.escape(name) for name, _ in model.named_children()]
        assert find_units(model, names)[0] == names
        return calls(lambda: find_units(model, names))

    assert calls_for(400) < 5 * calls_for(100)
