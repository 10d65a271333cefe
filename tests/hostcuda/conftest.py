"""Ranks for the tests of this folder, which are skipped where their device cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hostcuda
from tests.hostcuda.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = hostcuda.obstacle()
    folder = str(Path(__file__).parent)
    here = [item for item in items if str(item.path).startswith(folder)]  # of ten thousand, fast
    for item in here:
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))  # whichever is first builds the device and starts ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks
