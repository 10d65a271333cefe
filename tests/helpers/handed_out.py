"""In which order, and how many at a time, xdist's workers are given tests.

A file's tests are one worker's: what they share, such as a module's fixtures and the runs that they are compared with,
is computed once and not in every worker. Groups begin, as they are the longest; tests of milliseconds come last, one by
one, so that workers end together.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

__all__ = ["FILLERS", "Files"]

FILLERS = ("tests/config/", "tests/dialects/")
"""Folders whose tests share next to nothing."""


class Files(LoadGroupScheduling):
    """Units are groups, files, and single tests of `FILLERS`, in this order; of a kind those with most tests first."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._groups: set[str] = set()

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        if scope != nodeid:
            self._groups.add(scope)
        elif not nodeid.startswith(FILLERS):
            scope = nodeid.partition("::")[0]
        return scope

    def _assign_work_unit(self, node: Any) -> None:
        if not any(self.assigned_work.values()):  # the first
            for unit in sorted(self.workqueue, key=lambda unit: (unit not in self._groups, unit.startswith(FILLERS))):
                self.workqueue.move_to_end(unit)
        super()._assign_work_unit(node)
