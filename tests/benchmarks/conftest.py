"""Ranks of the benchmarks start as forks: the tests are about what is measured, not how long Python takes to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.forkserver import spawning_by_fork


@pytest.fixture(autouse=True)
def _ranks_are_forks() -> Iterator[None]:
    with spawning_by_fork():
        yield
