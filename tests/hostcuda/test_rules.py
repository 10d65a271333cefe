"""Every rule of the simulated device: it says nothing of a right program, and names what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostcuda.attempts import NOTES, RULES, attempt, noted
from tests.hostcuda.mutations import MUTATIONS
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_program_is_found_out_and_a_right_one_is_not(name: str, two_ranks: Ranks) -> None:
    right = two_ranks.run(attempt, name, False)
    assert right == [[], []]
    told = RULES[name][1]
    for found in two_ranks.run(attempt, name, True):
        assert any(told in text for text in found), f"{told!r} is not in {found}"


@pytest.mark.parametrize("name", NOTES)
def test_whether_the_host_waits_is_noted(name: str, one_rank: Ranks) -> None:
    assert one_rank.run(noted, name) == [NOTES[name][1]]


def test_the_page_names_every_rule_and_every_fault() -> None:
    page = Path(__file__).parents[2].joinpath("docs/concepts/cuda-without-a-gpu.md").read_text()
    for name in (*RULES, *MUTATIONS):
        words = name.replace("_s_", "'s_").replace("_", " ")
        assert f"| {words} | " in page
