"""Faults of the engine: each is found by the device while a model trains, and none is without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cover import mostly_long
from tests.hostcuda.mutations import MUTATIONS, findings_with
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test


@pytest.mark.parametrize(
    "name", mostly_long(MUTATIONS, *list(MUTATIONS)[::8], "a_thread_that_copies_uses_the_first_device")
)
def test_a_fault_of_the_engine_is_found(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(findings_with, name, str(tmp_path))
    print(name, first, second)
    if name == "a_thread_that_copies_uses_the_first_device":  # which is the first rank's own
        assert (first, second) == ([], ["foreign"])
        return
    for found in (first, second):
        assert {"race", "early free"} & set(found), found
