"""The list of `make gpu`: its order, what it makes of steps that pass, fail and cannot be run, and its expectations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hostcuda
from benchmarks.gpu import first
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.expected import expected
from benchmarks.gpu.first import STEPS, Step, run_all, table

PASSES = Step("passes", "numbers", ("-c", "print('noise'); print('RESULT {\"x\": 2.5}')"))
FAILS = Step("fails", "an error", ("-c", "import sys; print('said'); raise AssertionError('because | of that')"))
LATE = Step("late", "no end", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), limit_s=1.0)
MANY = Step("many", "more GPUs than there are", ("-c", ""), devices=64)
NO_TEST = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-k", "nothing-of-this-name")
TESTS = Step("tests", "no test is left", (*NO_TEST, "tests/test_lint_finalizers.py"))  # which imports no torch


def on(devices: int, monkeypatch: pytest.MonkeyPatch, *steps: Step) -> dict[str, Any]:
    monkeypatch.setattr(first, "STEPS", steps)
    monkeypatch.setattr(first, "_device", lambda environment: ("NVIDIA H100 80GB HBM3", devices, {}))
    monkeypatch.delenv("TERRAZZO_GPU", raising=False)
    return run_all()


def test_a_step_that_fails_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = on(1, monkeypatch, FAILS, LATE, MANY, TESTS, PASSES)["steps"]
    assert [step["status"] for step in steps] == ["fail", "fail", "skipped", "fail", "pass"]
    failed, late, many, tests, passed = steps
    assert failed["why"] == "AssertionError: because | of that"
    assert "said" in failed["output"]
    assert late["why"] == "no end within 1 s"
    assert late["output"] == ["begun"]
    assert many["why"] == "needs 64 GPUs, and there is 1"
    assert "deselected" in tests["why"]
    assert passed["numbers"] == {"x": 2.5}


def test_the_benchmark_fails_where_terrazzo_does_and_not_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns = [{"step_s": [1.0], "peak_bytes": 2**30, "loss": 1.0}]
    good = {"turns": turns, "step_s": 0.25, "peak_bytes": 2**30}
    for failed, status, why in (
        ("NoRoom: needs about 90 GiB, 70 GiB are free", "pass", ""),
        ("OutOfMemoryError: CUDA", "fail", "8B-8-eager: OutOfMemoryError: CUDA"),
    ):
        cases = {"alone-eager": good, "8B-8-eager": {"turns": [], "failed": failed}}
        record = {"cases": {name: {"contenders": {"terrazzo": found}} for name, found in cases.items()}, "targets": []}
        written = tmp_path / "written"
        written.write_text(json.dumps(record))
        copied = f"import shutil, sys; shutil.copy({str(written)!r}, sys.argv[1])"
        (step,) = on(1, monkeypatch, Step("benchmark", "", ("-c", copied, "{record}")))["steps"]
        assert (step["status"], step["why"]) == (status, why)
        assert step["record"] == record
        assert step["numbers"] == ({"alone-eager: step ms": 250.0, "alone-eager: peak GiB": 1.0} if not why else {})


def test_the_table_has_a_row_for_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    record = on(1, monkeypatch, FAILS, PASSES)
    lines = table(record).splitlines()
    assert lines[0] == "1 × NVIDIA H100 80GB HBM3; planned as NVIDIA H100 80GB HBM3"
    assert lines[-2].startswith("| fails: an error | fail: AssertionError: because \\| of that |")
    assert lines[-1].endswith("| x | 2.5 | - |")


def test_without_a_gpu_nothing_is_run_and_each_step_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first, "_device", lambda environment: ("no CUDA device", 0, {}))
    monkeypatch.setattr(sys, "argv", ["first", "--out", str(tmp_path / "made" / "record.json")])
    with pytest.raises(SystemExit) as left:
        first.main()
    assert left.value.code == 0
    steps = json.loads((tmp_path / "made" / "record.json").read_text())["steps"]
    assert {(step["status"], step["why"]) for step in steps} == {("skipped", "torch sees no CUDA device")}
    assert len(steps) == len(STEPS)
    assert f"The record is in {tmp_path}/made/record.json." in capsys.readouterr().out


def test_a_failure_is_in_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["first", "--out", str(tmp_path / "record.json"), "--only", "f*"])
    monkeypatch.setattr(first, "STEPS", (PASSES, FAILS))
    monkeypatch.setattr(first, "_device", lambda environment: ("a GPU", 1, {}))
    with pytest.raises(SystemExit) as left:
        first.main()
    assert left.value.code == 1
    (step,) = json.loads((tmp_path / "record.json").read_text())["steps"]
    assert step["step"] == "fails"


def test_the_list_has_every_check_in_the_order_that_was_planned() -> None:
    assert [step.name for step in STEPS] == [
        "ranks", "tests", "training", "collectives", "offload", "sanitizer", "clipping", "rate", "syncs", "benchmark",
        "memory", "memory, expandable", "compiled",
    ]  # fmt: skip
    asked = {step.command[-1] for step in STEPS if "benchmarks.gpu.checks" in step.command}
    assert asked == set(CHECKS)


# -- expectations ------------------------------------------------------------------------------------------------------


def test_memory_is_expected_of_a_device_that_is_known() -> None:
    numbers = {"allocated GiB": 1.0, "reserved GiB": 1.0, "reserved / allocated": 1.0}
    for name in ("h100", "NVIDIA H100 80GB HBM3"):
        found = expected("memory, expandable", name, numbers)
        assert set(found) == set(numbers)
        assert 8.0 < found["allocated GiB"] < found["reserved GiB"] < 60.0
    assert expected("memory", "a GPU of tomorrow", numbers) == {}


def test_the_benchmark_s_steps_are_expected_without_communication() -> None:
    numbers = {
        "alone-eager: step ms": 1.0,
        "1B-8-compiled: step ms": 1.0,
        "1B-8-compiled: peak GiB": 1.0,
        "missed: y": 1.0,
    }
    slow, fast = (expected("benchmark", gpu, numbers) for gpu in ("a100", "h100"))
    assert set(slow) == set(fast) == set(numbers) - {"missed: y"}
    for name in ("alone-eager: step ms", "1B-8-compiled: step ms"):
        assert 10 < fast[name] < slow[name] < 5000


def test_another_device_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "STEPS", (Step("memory", "", ("-c", "print('RESULT {\"allocated GiB\": 1}')")),))
    monkeypatch.setattr(first, "_device", lambda environment: ("Simulated CUDA", 1, {}))
    monkeypatch.setenv("TERRAZZO_GPU", "h200")
    record = run_all()
    assert record["planned_as"] == "h200"
    assert record["steps"][0]["expected"]["allocated GiB"] > 8.0


# -- all of it ---------------------------------------------------------------------------------------------------------

why = hostcuda.obstacle()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(why is not None, reason=str(why))
def test_the_list_runs_on_the_simulated_device() -> None:
    steps = run_all(simulated=True)["steps"]
    assert [(step["step"], step["status"], step["why"]) for step in steps] == [
        (step.name, "pass", "") for step in STEPS
    ]
