"""The suite: its arithmetic, its refusal to report unequal training, one small real run, and the committed record."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.cpu import compare, suite
from benchmarks.cpu.cases import CASES
from benchmarks.cpu.compare import Effort, take_turns
from benchmarks.cpu.contenders import CONTENDERS
from benchmarks.cpu.outcome import Outcome, disagreements, ratio
from benchmarks.cpu.rank import Steps
from benchmarks.cpu.report import table
from benchmarks.cpu.targets import TARGETS, of_floor
from benchmarks.cpu.targets import table as targets_table
from tests.helpers import programs

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "cpu" / "record.json"
EFFORT = Effort(rounds=1, steps=2, warmup=1, ranks=2)


def forked(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
    """What `subprocess.run` would return of this Python program, which has torch already."""
    return programs.run(*words[1:], env=env)


def _outcome(contender: str, group: int, rounds: list[tuple[list[float], list[float]]], **more: Any) -> Outcome:
    """Two ranks; each round gives the step times of both."""
    turns = [[Steps(times, [1.0] * len(times), [2.0] * len(times)) for times in turn] for turn in rounds]
    return Outcome(contender, group, turns, training_peak_bytes=3_000_000, overall_peak_bytes=4_000_000, **more)


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    assert _outcome("ddp", 0, [([1.0, 5.0, 2.0], [3.0, 1.0, 1.0])]).round_s() == [3.0]


def test_ratios_are_taken_within_a_round_of_one_group() -> None:
    # The machine is twice as slow in the second round, and three times in the second group.
    outcomes = [
        _outcome("ddp", 0, [([1.0], [1.0]), ([2.0], [2.0])]),
        _outcome("fsdp1", 0, [([0.5], [0.5]), ([1.0], [1.0])]),
        _outcome("ddp", 1, [([3.0], [3.0]), ([3.0], [3.0])]),
        _outcome("fsdp2", 1, [([6.0], [6.0]), ([6.0], [6.0])]),
    ]
    assert [ratio(name, "ddp", outcomes) for name in ("ddp", "fsdp1", "fsdp2")] == [1.0, 0.5, 2.0]
    assert ratio("fsdp2", "fsdp1", outcomes) is None
    rows = table(outcomes, ["ddp"]).splitlines()
    assert rows[3] == "| FSDP1 | 0.50 | 750 | 500 to 1000 | 1000 | 3 | 4 | 0 | 0.00 |"


def test_unequal_training_is_named() -> None:
    same, other = _outcome("ddp", 0, [([1.0], [1.0])]), _outcome("fsdp2", 0, [([1.0], [1.0])])
    assert disagreements([same, other], 1e-5) == []
    other.turns[0][1].losses[0] = 2.0001
    assert disagreements([same, other], 1e-5) == ["fsdp2: losses differ from those of ddp by up to 5.0e-05"]
    assert disagreements([same, other], 1e-4) == []
    other.turns[0][1].losses[0] = float("nan")
    assert len(disagreements([same, other], 1e-5)) == 1


def test_the_floor_is_compute_or_bytes() -> None:
    alone = _outcome("alone", 0, [([2.0], [1.0]), ([8.0], [4.0])], wire_s_per_byte=1e-9)
    for sent_bytes, expected in ((1e9, 2.0), (5e9, 2.0), (8e9, 1.25)):
        own = _outcome("terrazzo-zero3", 0, [([4.0], [4.0]), ([16.0], [16.0])], sent_bytes=sent_bytes)
        assert of_floor("traffic", "zero3")({"traffic": [alone, own]}) == expected
    assert of_floor("traffic", "zero3")({"traffic": [alone]}) is None


def test_targets_say_met_missed_or_not_measured() -> None:
    cases = {"lora": [_outcome("fsdp2", 0, [([2.0], [2.0])]), _outcome("terrazzo-zero3", 0, [([1.0], [1.0])])]}
    rows = targets_table(cases, [("more", 1.0, 2.0)]).splitlines()
    assert "| lora: `zero3` / FSDP2, time | 0.50 | 0.50 | met |" in rows
    assert "| lora: `zero3` / FSDP2, peak | 0.60 | 1.00 | **missed** |" in rows
    assert "| traffic: `zero0` / DDP | 1.00 | not measured |  |" in rows
    assert rows[-1] == "| more | 1.00 | 2.00 | **missed** |"
    assert len(rows) == len(TARGETS) + 3


def test_every_run_names_cases_and_contenders_that_exist() -> None:
    for runs in suite.SUITES.values():
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            assert run.case in CASES
            assert {name for group in run.groups for name in group} <= set(CONTENDERS)
            assert set(run.baselines) <= {name for group in run.groups for name in group}


@pytest.mark.parametrize("case", CASES)
def test_every_case_describes_itself(case: str) -> None:
    assert "M parameters" in CASES[case].describe()


@pytest.mark.long
@pytest.mark.processes
def test_plans_and_peers_take_turns_and_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import_s = compare.import_s
    monkeypatch.setattr(compare, "import_s", lambda library: import_s("terrazzo"))  # one program for all
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=forked))
    outcomes = take_turns("tiny", ["alone", "fsdp2", "terrazzo-zero3"], EFFORT)
    assert [len(outcome.losses()) for outcome in outcomes] == [4] * 3
    assert disagreements(outcomes, 1e-5) == []
    assert all(0 < o.training_peak_bytes < 100e6 and min(o.round_s()) > 0 for o in outcomes)
    assert all(outcome.startup_s > 0 for outcome in outcomes)
    assert outcomes[0].wire_s_per_byte is not None
    # Two thirds of its weights are gathered twice and all gradients reduced once, half of each by a rank.
    numel = sum(p.numel() for p in CASES["tiny"].model("meta").parameters())
    assert 1.4 * numel * 4 < outcomes[-1].sent_bytes < 1.6 * numel * 4


@pytest.mark.long
@pytest.mark.processes
def test_where_matrices_are_shared_both_train_the_same() -> None:
    """Losses of DTensor's tensor parallelism over FSDP2, and of `tp`."""
    outcomes = take_turns("matrices-small", ["fsdp2-tensor", "terrazzo-zero3-tensor"], EFFORT)
    assert disagreements(outcomes, 1e-5) == []


@pytest.mark.long
@pytest.mark.processes
def test_where_experts_are_shared_both_train_the_same() -> None:
    """Losses of transformers' own plan over FSDP2, and of `ep`."""
    pytest.importorskip("transformers")
    outcomes = take_turns("mixture-small", ["fsdp2-experts", "terrazzo-zero3-experts"], EFFORT)
    assert disagreements(outcomes, 1e-5) == []


def test_the_committed_report_and_readme_are_made_from_the_record() -> None:
    record = json.loads(RECORD.read_text())
    assert RECORD.with_name("report.md").read_text() == suite.markdown(record)
    assert readme.section(record) in (ROOT / "README.md").read_text()
