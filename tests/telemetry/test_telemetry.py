"""What is measured, how it reads, and where it goes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import terrazzo as tz
from terrazzo.errors import BadInput
from terrazzo.telemetry import (
    JsonLines,
    PeakMemory,
    ReportPage,
    RunConsole,
    StepMetrics,
    StepTable,
    Stopwatch,
    TensorBoard,
    duration,
)
from terrazzo.telemetry.log.run_folder import RunFolder
from tests.helpers.threads import run_in_threads

METRICS = StepMetrics(
    step=20,
    loss=1.5,
    learning_rate=3e-4,
    tokens=40_960,
    step_s=0.25,
    tokens_per_s=8192.0,
    data_wait=0.01,
    communication=0.25,
    peak_memory_bytes=3 * 2**29,
)


OPTIONAL = ["mfu", "tflops", "communication", "skipped_steps", "disk_read_gb_s", "disk_write_gb_s", "cpu_step_gparam_s"]
LARGEST = replace(
    METRICS, step=10**6, loss=12.3456, tokens_per_s=98_765_432.0, peak_memory_bytes=1600 * 2**30, grad_norm=1e30,
    mfu=0.999, tflops=12345.6, communication=1.0, data_wait=1.0, skipped_steps=123456, disk_read_gb_s=123.4,
    disk_write_gb_s=123.4, cpu_step_gparam_s=123.4,
)  # fmt: skip


def test_a_row_has_what_this_run_measures_and_blanks_for_nothing() -> None:
    table = StepTable(1000, {"communication"}, 80)
    assert table.header().split() == ["step", "loss", "norm", "lr", "tok/s", "comm", "data", "memory", "left"]
    row = table.row(replace(METRICS, grad_norm=0.5, data_wait=0.001), 130.0)
    assert row.split() == ["20", "1.5000", "0.500", "3.0e-04", "8,192", "25%", "1.50", "GiB", "2", "min"]
    assert len(row) == len(table.header()), "columns stand below their titles"
    fast = StepTable(1000, {"mfu", "skipped_steps"}, 80)
    assert "comm" not in fast.header()
    assert fast.row(replace(METRICS, mfu=0.42, skipped_steps=3), 1.0).split()[3:6] == ["42.0%", "1%", "3"]
    assert "TFLOP/s" not in StepTable(1000, {"mfu", "tflops"}, 120).header(), "MFU says it"
    assert table.remark(20, "held out", "1.2500").startswith(row[:6] + "   1.2500  held out")


@pytest.mark.parametrize("known", [set(subset) for n in (0, 2, 7) for subset in itertools.combinations(OPTIONAL, n)])
@pytest.mark.parametrize("width", [80, 120])
def test_a_row_fits_the_terminal(known: set[str], width: int) -> None:
    """What does not fit has no column; loss, pace, memory and time left always have."""
    table = StepTable(10**6, known, width)
    assert max(len(table.header()), len(table.row(LARGEST, 9e6))) <= width
    assert {"loss", "tok/s", "memory", "left"} <= set(table.header().split())


def test_durations_read_at_a_glance() -> None:
    assert [duration(seconds) for seconds in (0.2, 119, 120, 7200, 5400 * 3, 86400 * 12)] == [
        "0 s", "119 s", "2 min", "2.0 h", "4.5 h", "12 d",
    ]  # fmt: skip


def test_the_page_of_a_run_has_its_curves_and_nothing_of_it_is_obeyed(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(3000):
        metrics.log("train", step, {"loss": 3.0 - step / 1000})
    metrics.log("train", 3000, {"learning_rate": 0.1})  # its loss was not finite
    metrics.log("validation", 3000, {"loss": 0.0})
    metrics.log("sample", 3000, {"text": "<script>alert(1)</script>"})
    page = ReportPage(tmp_path / "report.html", metrics.path, "a & b", {"Plan": "zero3"}, lambda said: [f"{said}"])
    page.log("summary", 3000, {"states": 1})
    page.close()
    metrics.close()
    shown = (tmp_path / "report.html").read_text()
    assert "<script" not in shown
    assert "a &amp; b" in shown
    assert "&#x27;states&#x27;: 1" in shown
    train, validation = re.findall(r'points="([^"]+)"', shown)
    assert 500 < len(train.split()) <= 1001
    assert train.split()[0].startswith("48.0,")
    assert validation == "672.0,232.0", "the lowest loss of the last step is at the right end of the axis"


def test_unknown_and_infinite_values_are_not_written() -> None:
    values = replace(METRICS, grad_norm=float("inf"), tflops=1.0).as_dict()
    assert "grad_norm" not in values
    assert "mfu" not in values
    assert values["tflops"] == 1.0
    json.dumps(values, allow_nan=False)


def test_a_resumed_run_replaces_the_lines_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = JsonLines(path)
    for step in (10, 20, 30):
        first.log("train", step, {"loss": float(step)})
    first.log("summary", 30, {})
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # cut short by a kill
    resumed = JsonLines(path, first_step=20)
    resumed.log("train", 30, {"loss": 0.0})
    resumed.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 10.0), (20, 20.0), (30, 0.0)]
    JsonLines(path).close()
    assert path.read_text() == "", "a new run starts a new file"


def test_history_survives_a_kill_at_any_point_of_a_resume(tmp_path: Path) -> None:
    """Whatever the system is asked to do while a run takes its file up again, the lines to keep are there before it."""
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(1, 40):
        first.log("train", step, {"loss": 0.5})
    first.close()
    history = path.read_bytes().splitlines()[:20]
    seen = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        if event in ("c_call", "c_return"):
            seen += argument.__name__ in ("open", "writelines", "fsync", "replace")
            assert path.read_bytes().splitlines()[:20] == history, "a kill here would lose them"

    sys.setprofile(look)
    try:
        JsonLines(path, first_step=20).close()
    finally:
        sys.setprofile(None)
    assert path.read_bytes().splitlines() == history
    assert seen >= 8
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_damaged_line_does_not_end_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n\0\0\0\n[1]\n{"kind": "train", "step": "x"}\n\xff\n')
    JsonLines(path, first_step=3).close()
    assert path.read_bytes() == b'{"kind": "train", "step": 1}\n'


def test_a_run_goes_on_without_a_reader(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = RunConsole()
        console.begin(10)
        console.say("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for step in range(3):
            console.say("unread " * 10_000)
            console.advance(step)
        console.close()
        console.say("how to go on", needed=True)
    *_, warned, last = capfd.readouterr().err.splitlines()
    assert warned.startswith("Standard output is closed (nobody reads it any more)")
    assert last == "how to go on"


def test_a_run_goes_on_with_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lines are whole, or not there; and it goes on writing when there is room again."""
    import resource

    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.log("train", 1, {"loss": "x" * 1000})  # standard error is a file, too
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))  # a line is cut short, and fails
    try:
        for step in (2, 3):
            sink.log("train", step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    sink.log("train", 4, {"loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert capfd.readouterr().err.count(f"'{path}' cannot be written") == 1


def test_tensorboard_gets_numbers_and_text(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.log("train", 5, {"loss": 2.5, "tokens": 7})
    sink.log("sample", 5, {"text": "def f"})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 2.5)]
    assert events.Scalars("train/tokens")[0].value == 7
    assert "sample/text/text_summary" in events.Tags()["tensors"]
    TensorBoard(tmp_path, first_step=5).close()
    assert len(list(tmp_path.iterdir())) == 2, "a resumed run adds a file"
    TensorBoard(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 1, "a new run starts anew"


def test_the_stopwatch_leaves_pauses_out() -> None:
    now = [100.0]
    watch = Stopwatch(lambda: now[0])
    with watch.measure():
        now[0] += 2
    with watch.pause():
        now[0] += 50
    now[0] += 3
    assert (watch.total_s, watch.measured_s) == (5, 2)
    watch.reset()
    assert (watch.total_s, watch.measured_s) == (0, 0)


def test_peak_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    peak = PeakMemory(torch.device("cpu")).peak_bytes
    assert 50 * 2**20 < peak < 2**40
    ballast = torch.ones(2**26)  # 256 MiB
    assert PeakMemory(torch.device("cpu")).peak_bytes >= max(peak, ballast.nbytes)


def test_a_long_line_is_wrapped_on_a_terminal_and_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "bytes     " + "states 17.26, transient 9.95, sent per step 17.14 MiB, as promised, and more of it"
    assert RunConsole().wrapped(said, 10) == said
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "60")
    first, second = RunConsole().wrapped(said, 10).splitlines()
    assert len(first) <= 60
    assert second.startswith(" " * 10) and second[10] != " "
    assert f"{first} {second.strip()}" == said


def test_the_bar_of_a_terminal_says_what_it_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = RunConsole()
    console.begin(10, 3)
    for step in (4, 5, 3, 4):  # back to 3 in between
        console.advance(step)
    console.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"step +4/10 \S+.* 0:00:0\d elapsed", shown)


def attached(rank: int, folder: Path, **options: Any) -> None:
    """Two steps of a small model."""
    model, optimizer = tz.shard(nn.Linear(2, 2), torch.optim.SGD, "zero1")
    telemetry = tz.telemetry.attach(model, folder, every=1, tensorboard=True, stall_s=None, **options)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    telemetry.close()


def test_a_run_that_goes_on_keeps_its_event_files(tmp_path: Path) -> None:
    run_in_threads(1, lambda rank: attached(rank, tmp_path))
    before = set((tmp_path / "tensorboard").iterdir())
    run_in_threads(1, lambda rank: attached(rank, tmp_path, first_step=2))
    assert before and before < set((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("given", ["20", True, 0.0, float("nan")], ids=str)
def test_seconds_of_the_watchdog_are_a_number_above_0(given: Any, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, _ = tz.shard(nn.Linear(2, 2), torch.optim.SGD, "zero1")
        with pytest.raises(BadInput, match=r"stall_s=.*use seconds above 0"):
            tz.telemetry.attach(model, tmp_path, stall_s=given)

    run_in_threads(1, body)


def test_event_files_that_cannot_be_written_are_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")

    def body(rank: int) -> None:
        with pytest.raises(BadInput, match="tensorboard"):
            attached(rank, tmp_path)

    run_in_threads(2, body)


def test_each_place_in_a_runs_folder_is_among_what_is_written_there() -> None:
    """So that data are never read from one: a place that is new has to be told of."""
    own_keys = {"checkpoints", "swap"}
    there = RunFolder(Path("run"))
    for name in {name for name, it in vars(RunFolder).items() if isinstance(it, property)} - own_keys - {"every_file"}:
        assert any(path.is_relative_to(getattr(there, name)) for path in there.every_file), name
