"""The CPUs of a process, also where the system has no masks of them."""

from __future__ import annotations

import os

import pytest

from terrazzo.launch.environment import library_settings
from terrazzo.processes.cpus import allowed_cpus


def test_a_mask_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5}, raising=False)
    assert allowed_cpus() == {2, 5}


def test_without_masks_all_may_be_used_and_settings_are_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    assert allowed_cpus() == {0, 1, 2, 3}
    assert "GOMP_SPINCOUNT" not in library_settings()
