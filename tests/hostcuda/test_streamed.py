"""Exchanges of fragments that go on beside training, on the simulated device: the host's numbers, and no race."""

from __future__ import annotations

import pytest

from tests.helpers.cover import mostly_long
from tests.hostcuda.cases import TOLERANCES
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.streamed import stream

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


@pytest.mark.parametrize("traffic", mostly_long(["fp32", "int8"], "fp32"))
@pytest.mark.parametrize("plan", mostly_long(["zero3", "zero3@cpu-all"], "zero3"))
def test_fragments_that_stream(plan: str, traffic: str, two_ranks: Ranks) -> None:
    for found in two_ranks.run(stream, plan, traffic):
        assert found.faults == []
        assert found.weights <= TOLERANCES["fp32"][0]
        assert found.held <= found.promised
