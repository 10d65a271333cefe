"""Whether a run has as many ranks as it should: by the planner's pace for fewer and more, from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import config_from_dict
from terrazzo.planner.machine.devices import Cluster, Device, device
from terrazzo.train.planning import as_setup
from terrazzo.train.report.rank_count import sizing_of

GIB = 2**30
CONFIG = {
    "model": {"dim": 1024, "layers": 8, "heads": 8, "vocab_size": 4096},
    "plan": "zero3",
    "batch": {"global_batch": 64, "micro_batch": 2, "sequence_length": 1024},
    "train": {"steps": 10},
}
LINES = [
    {"kind": "train", "step": step, "step_s": 0.5, "tokens_per_s": rate}
    for step, rate in ((1, 1.0), (11, 9e3), (13, 15e3))
]


def machine(monkeypatch: pytest.MonkeyPatch, link: float) -> None:
    links = {"scaleup_bandwidth": link, "internode_bandwidth": link, "per_node": 64}
    monkeypatch.setattr(as_setup, "machine_of", lambda _: Cluster(replace(device("h100-sxm"), **links)))


def written(folder: Path, **sections: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config_from_dict(CONFIG | sections).model_dump(mode="json")))
    return path


def test_pace_is_anchored_to_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a link that costs nothing tokens per second go with the ranks. Of ten steps with 9,000 and two with 15,000
    tokens per second the mean is 10,000; the first log step is left out.
    """
    machine(monkeypatch, link=1e15)
    found = sizing_of(written(tmp_path), LINES, 4)
    assert found is not None and found.table is not None
    rows = {row[0]: row for row in found.table.rows}
    assert list(rows) == ["2", "4", "8"]
    assert rows["4"][1:4] == ("10,000", "measured", "2,500")
    paces = [float(rows[ranks][1].replace(",", "")) for ranks in ("2", "4", "8")]
    assert paces[0] == pytest.approx(5_000, rel=0.1)
    assert paces[2] == pytest.approx(20_000, rel=0.1)
    assert rows["8"][2].startswith("±")
    assert found.sentence.startswith("More ranks would pay: 8 would bring")


def test_what_more_ranks_made_is_not_what_these_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, link=1e15)
    shrunk = [*LINES, {"kind": "restart", "step": 13, "ranks": 2}]
    shrunk += [LINES[0] | {"step": step, "tokens_per_s": rate} for step, rate in ((14, 1.0), (15, 5e3))]
    found = sizing_of(written(tmp_path), shrunk, 2)
    assert found is not None and found.table is not None
    assert ("2", "5,000", "measured") in [row[:3] for row in found.table.rows]


def test_ranks_that_wait_for_each_other_alone_are_too_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, link=1e6)
    found = sizing_of(written(tmp_path, plan="zero1"), LINES, 4)  # which reduces once a step, whatever its batch
    assert found is not None
    assert found.sentence.startswith("Too many ranks: 2 would keep")
    machine(monkeypatch, link=1e8)
    found = sizing_of(written(tmp_path), LINES, 4)
    assert found is not None
    assert "would bring" in found.sentence and found.sentence.startswith("As many ranks as pay")


def test_what_cannot_be_judged_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, link=1e12)
    few = written(tmp_path, plan={"name": "zero3", "mesh": {"dp_shard": 4}})
    found = sizing_of(few, LINES, 4)
    assert found is not None and found.table is not None
    assert [row[0] for row in found.table.rows] == ["4"]
    assert "Not judged: 8 ranks: " in found.sentence
    assert sizing_of(few, LINES[:0], 4) is None
    monkeypatch.setattr(as_setup, "machine_of", lambda _: Cluster(Device("a host", kind="cpu", memory_bytes=80 * GIB)))
    found = sizing_of(few, LINES, 4)
    assert found is not None
    assert found.table is None
    assert "--calibrate` has measured them" in found.sentence
