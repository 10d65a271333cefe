"""Matrices and sequences that ranks share, on the simulated device: the host's numbers, no race, and no wait."""

from __future__ import annotations

import itertools

import pytest

from tests.hostcuda.cases import TOLERANCES
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.shared import MICRO, SHAPE, Shared, compare, faults_of_a_hasty_ring, waits_unplaced

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

FAST = [Shared(cp=2, mode="ring", documents=True)]
MODES = ("gather", "ulysses", "ring")
ALL = [
    *(Shared(tp=2, plan=plan, split=split) for plan in ("zero3", "zero2") for split in (True, False)),
    *(Shared(cp=2, mode=mode, documents=documents) for mode, documents in itertools.product(MODES, (True, False))),
]
PRODUCT = [
    Shared(2, 2, mode, plan, precision, documents, recomputed=documents)
    for mode, (plan, precision, documents) in itertools.product(
        MODES, [("zero3", "fp32", True), ("zero2", "bf16", False)]
    )
]


def check(case: Shared, ranks: Ranks) -> None:
    weights, losses = TOLERANCES[case.precision]
    for found in ranks.run(compare, case):
        assert found.faults == []
        assert found.waits == {}
        assert found.weights <= weights
        assert found.losses <= losses


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_ranks_that_share_train_as_on_the_host(case: Shared, two_ranks: Ranks) -> None:
    check(case, two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in ALL if case not in FAST], ids=lambda case: case.name)
def test_either_axis_alone(case: Shared, two_ranks: Ranks) -> None:
    check(case, two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: case.name)
def test_both_axes(case: Shared, four_ranks: Ranks) -> None:
    check(case, four_ranks)


@pytest.mark.parametrize("mode", ["gather", pytest.param("ulysses", marks=pytest.mark.long)])
def test_positions_that_are_only_on_the_device_are_waited_for_once(mode: str, two_ranks: Ranks) -> None:
    """In each forward: `Context.place` is what avoids it."""
    assert two_ranks.run(waits_unplaced, mode) == [1, 1]


def test_ranks_that_share_experts_wait_for_counts_alone(two_ranks: Ranks) -> None:
    """Each call of a module: `torch.bincount` waits, and its counts go to the host."""
    weights, losses = TOLERANCES["fp32"]
    for found in two_ranks.run(compare, Shared(ep=2)):
        assert found.faults == []
        assert {where.partition(":")[0] for where in found.waits} == {"forward"}
        assert sorted(found.waits.values()) == [SHAPE.layers * MICRO] * 2
        assert found.weights <= weights
        assert found.losses <= losses


@pytest.mark.long
def test_keys_that_are_used_before_they_are_there_are_found(two_ranks: Ranks) -> None:
    for faults in two_ranks.run(faults_of_a_hasty_ring):
        assert any("race" in fault and "all_to_all" in fault for fault in faults)
