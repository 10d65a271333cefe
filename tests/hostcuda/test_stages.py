"""Stages of a pipeline on the simulated device: the host's numbers, and no race."""

from __future__ import annotations

import pytest

from tests.hostcuda.cases import TOLERANCES
from tests.hostcuda.ranks import Ranks
from tests.hostcuda.stages import Staged, compare, faults_of_hasty_stages

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

TWO = [Staged(), Staged(chunks=2, precision="bf16"), Staged(schedule="zero_bubble", plan="zero1")]
FOUR = [
    Staged(pp=4, schedule="gpipe", recomputed=True),
    *(Staged(plan=plan, schedule=s) for plan in ("zero2", "zero3", "zero2@cpu") for s in ("1f1b", "zero_bubble")),
]


def check(case: Staged, ranks: Ranks) -> None:
    weights, losses = TOLERANCES[case.precision]
    for found in ranks.run(compare, case):
        assert found.faults == []
        assert found.weights <= weights
        assert found.losses <= losses


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_stages_train_as_on_the_host(case: Staged, two_ranks: Ranks) -> None:
    check(case, two_ranks)


@pytest.mark.parametrize("case", [FOUR[-1], *(pytest.param(case, marks=pytest.mark.long) for case in FOUR[:-1])])
def test_stages_of_several_data_ranks(case: Staged, four_ranks: Ranks) -> None:
    check(case, four_ranks)


def test_activations_that_are_used_before_they_are_there_are_found(two_ranks: Ranks) -> None:
    assert any(
        "race" in fault and "recv" in fault for faults in two_ranks.run(faults_of_hasty_stages) for fault in faults
    )
