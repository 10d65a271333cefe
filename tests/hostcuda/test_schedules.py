"""Random programs: the device says nothing of the right ones, and something of each wrong one."""

from __future__ import annotations

import pytest

from tests.hostcuda.ranks import Ranks
from tests.hostcuda.schedules import disagreements, written
from tests.hostcuda.timeline import faults_of_fsdp2

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


@pytest.mark.parametrize("sound", [True, False])
def test_of_random_programs_the_device_says_what_the_oracle_does(sound: bool, one_rank: Ranks) -> None:
    assert one_rank.run(disagreements, range(40), sound) == [[]]


@pytest.mark.long
@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("first", range(100, 2100, 500))
def test_of_many_random_programs_too(sound: bool, first: int, one_rank: Ranks) -> None:
    assert one_rank.run(disagreements, range(first, first + 500), sound, timeout_s=170.0) == [[]]


def test_there_are_right_and_wrong_programs_among_those_that_wait_by_chance() -> None:
    faulty = [written(seed, sound=False, length=4).faulty for seed in range(100)]
    assert 20 < sum(faulty) < 100


@pytest.mark.long
def test_of_fsdp2_the_device_says_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(faults_of_fsdp2) == [[], []]
