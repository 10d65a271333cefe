"""Stages of a pipeline on the simulated device: the host's numbers, and no race."""

from __future__ import annotations

import pytest

from tests.helpers.cover import mostly_long
from tests.hostcuda.cases import TOLERANCES
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.stages import Staged, compare, faults_of_hasty_stages

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

TWO = [
    Staged(),
    Staged(chunks=2, precision="bf16"),
    Staged(schedule="zero_bubble", plan="zero1"),
    Staged(tied=True),
]
FOUR = [
    Staged(pp=4, schedule="gpipe", recomputed=True),
    Staged(pp=4, tied=True, plan="zero1"),
    Staged(tied=True, plan="zero2@cpu", schedule="zero_bubble", precision="bf16"),
    *(Staged(plan=plan, schedule=s) for plan in ("zero2", "zero3", "zero2@cpu") for s in ("1f1b", "zero_bubble")),
]


def check(case: Staged, ranks: Ranks) -> None:
    weights, losses = TOLERANCES[case.precision]
    for found in ranks.run(compare, case):
        assert found.faults == []
        assert found.weights <= weights
        assert found.losses <= losses


@pytest.mark.parametrize("case", mostly_long(TWO, TWO[2]), ids=lambda case: case.name)
def test_stages_train_as_on_the_host(case: Staged, two_ranks: Ranks) -> None:
    check(case, two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_stages_of_several_data_ranks(case: Staged, four_ranks: Ranks) -> None:
    check(case, four_ranks)


@pytest.mark.parametrize("tied", mostly_long([False, True], True), ids=["activations", "tied gradients"])
def test_what_is_used_before_it_is_there_is_found(tied: bool, two_ranks: Ranks) -> None:
    found = [fault for faults in two_ranks.run(faults_of_hasty_stages, tied) for fault in faults]
    assert any("race" in fault and "recv" in fault for fault in found)
