"""The benchmark of checkpoints: the committed report is what its record says, and small runs count what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoints.measure import Effort, measure
from benchmarks.checkpoints.report import report, targets

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "checkpoints"


def test_the_committed_report_is_what_the_record_says() -> None:
    record = json.loads((RESULTS / "record.json").read_text())
    assert (RESULTS / "report.md").read_text() == report(record)
    assert len(targets(record)) == 7


@pytest.mark.long
@pytest.mark.processes
def test_a_small_run_times_every_contender_that_is_here(tmp_path: Path) -> None:
    record = measure(Effort("tiny", rounds=1), tmp_path)
    assert set(record["turns"]) == {"save", "blocked", "load", "reshard"}
    assert {"terrazzo", "dcp", "dd", "torch.save"} <= set(record["turns"]["save"])
    assert all(len(turns) == 1 and turns[0] > 0 for kind in record["turns"].values() for turns in kind.values())
    assert abs(record["total_bytes"] / sum(record["state_bytes"]) - 1) < 0.1
    assert not list(tmp_path.iterdir())
