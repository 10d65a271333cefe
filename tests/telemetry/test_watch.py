"""A run that goes on, seen from another terminal."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.errors import BadInput
from terrazzo.processes.system import birth_of, boot_id, pid_namespace
from terrazzo.telemetry import FlightRecorder, LiveRanks, has_ended, lines_of, rows_of, run_lines, screen_of
from terrazzo.telemetry.flight.folder import ranks_are_gone
from terrazzo.telemetry.log.records import GrowingLines
from terrazzo.telemetry.steps.metrics import StepMetrics
from tests.helpers import programs
from tests.telemetry.test_verdict import record, settings, write_run


def logged(step: int, loss: float) -> dict[str, Any]:
    metrics = {"learning_rate": 1e-3, "tokens": 64 * step, "step_s": 2.0, "tokens_per_s": 3200.0, "data_wait": 0.0}
    return {"kind": "train", "step": step, "loss": loss, "communication": 0.3, "peak_memory_bytes": 2**30, **metrics}


LINES = [
    {"kind": "validation", "step": 0, "loss": 5.25, "bits_per_byte": 7.57413},
    logged(10, 4.5),
    record(10, input=0.25, late=[0.5, 0.0, 0.25]),
    logged(20, 4.25),
    record(20, input=0.25, late=[0.5, 0.0, 0.25]),
]


def shown(lines: Any, **options: Any) -> str:
    return screen_of("run", lines, **{"steps": 40, "verdict": None, "age_s": 3.0, "width": 80} | options)


def test_a_screen_has_progress_log_steps_causes_and_ranks() -> None:
    text = shown(LINES, verdict="data bounds the step")
    assert text.startswith("run · step 20 of 40 · 20 s left · last record 3 s ago\n")
    header, validation, first, second = rows_of(LINES, 40, 80)
    assert header.split()[:2] == ["step", "loss"]
    assert validation == "     0   5.2500  held out, 7.5741 bits per byte"
    assert [row.split()[:2] for row in (first, second)] == [["10", "4.5000"], ["20", "4.2500"]]
    assert second.endswith("40 s")
    assert f"  input       25%  {'█' * 10}\n" in text
    assert "  late_peer   50%" in text
    assert f"  rank 0         0.5 s  {'█' * 40}\n" in text
    assert "  rank 1           0 s\n" in text.replace("s  \n", "s\n")
    assert text.endswith("\n\ndata bounds the step")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_is_left_counts_evaluations_and_saves_of_this_start_alone() -> None:
    """40 steps of 2 s each, of which every tenth is followed by an evaluation of 30 s: 5 s a step in all."""
    before = [logged(10, 5.0), record(10) | {"step_s": 900.0}, record(20) | {"step_s": 900.0}]
    begun = {"kind": "begin", "step": 20, "ranks": 2}
    now = [line for step in (30, 40, 50) for line in (logged(step, 4.0), record(step) | {"step_s": 5.0})]
    now[1] |= {"step_s": 70.0}  # with what is done once
    lines = [*before, begun, *now]
    *_, thirty, forty, fifty = rows_of(lines, 100, 80)
    assert [row.split("GiB")[1].strip() for row in (thirty, forty, fifty)] == ["2 min", "2 min", "4 min"]
    assert shown(lines, steps=100).startswith("run · step 50 of 100 · 4 min left")


def test_waits_of_less_than_a_hundredth_of_the_step_are_none() -> None:
    assert "waits for late ranks" not in shown([record(20, late=[5.5e-05, 0.009])])
    some = shown([record(20, late=[5.5e-05, 0.02])])
    assert "  rank 0           0 s  \n  rank 1        0.02 s  █" in some
    short = record(20, late=[5.5e-05, 0.0]) | {"step_s": 1e-3}
    assert "  rank 0    0.000055 s  █" in shown([short])


@pytest.mark.parametrize(
    ("metrics", "cells"),
    [({"communication": None}, ["10", "4.5000"]), ({"loss": math.nan}, ["10", "nan"])],
    ids=["on CUDA", "not finite"],
)
def test_a_log_step_that_lacks_what_is_not_known_has_its_row(metrics: dict[str, Any], cells: list[str]) -> None:
    """As a run writes it: on CUDA nobody knows how long it waits, and JSON has no number that is not finite."""
    known = {name: value for name, value in logged(10, 4.5).items() if name != "kind"}
    line = {"kind": "train", **StepMetrics(**known | metrics).as_dict()}
    header, row = rows_of([line], 40, 80)
    assert row.split()[:2] == cells
    assert ("comm" in header) == (metrics.get("communication", 0.3) is not None)


def test_a_restart_stands_between_the_log_steps() -> None:
    restart = {"kind": "restart", "step": 10, "number": 1, "most": 3, "ranks": 2, "why": "Rank 1 was ended by SIGKILL"}
    rows = rows_of([logged(10, 4.5), restart, logged(20, 4.25)], 40, 80)
    assert rows[2].split(maxsplit=1) == ["10", "restart 1 of 3, on 2 ranks, after: Rank 1 was ended by SIGKILL"]


def test_no_more_log_steps_than_a_screen_has_and_ranks_are_counted() -> None:
    text = shown([logged(step, 1.0) for step in range(1, 60)] + [record(60, late=[0.1] * 40)])
    assert [f"\n    {step}   1.0000" in text for step in (47, 48, 59)] == [False, True, True]
    assert "and 28 ranks more" in text


@pytest.mark.parametrize(("age_s", "silent"), [(3.0, False), (49.0, False), (51.0, True)])
def test_a_run_that_writes_nothing_is_said_to_be_silent(age_s: float, silent: bool) -> None:
    """Its records came every 10 s."""
    assert ("SILENT: records came every 10 s" in shown(LINES, age_s=age_s)) == silent
    ended = [*LINES, {"kind": "summary", "step": 40}]
    assert has_ended(ended)
    assert shown(ended, age_s=1e5).startswith("run · step 40 of 40 · ended\n")


def test_a_loop_of_ones_own_has_no_losses() -> None:
    text = shown([record(10), record(20)], steps=None)
    assert text.startswith("run · step 20 · last record")
    assert "    20  1 s a step" in text


def test_the_verb_shows_a_run_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LINES)
    (run / "config.json").write_text(json.dumps(settings(train={"steps": 40})))
    text = CliRunner().invoke(cli.app, ["watch", str(run), "--once"]).output
    assert f"{run} · step 20 of 40" in text.replace("\n", "")
    assert "bounds the step" in text
    for missing in (tmp_path / "none", tmp_path):
        result = CliRunner().invoke(cli.app, ["watch", str(missing), "--once"])
        assert isinstance(result.exception, BadInput)
    assert isinstance(CliRunner().invoke(cli.app, ["watch", str(tmp_path / "none")]).exception, BadInput)


def test_a_pipe_gets_each_row_once_until_the_run_ends(tmp_path: Path) -> None:
    """A folder in which nothing is written yet is waited for, and a torn line until it is whole."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(settings(train={"steps": 40})))

    def train() -> None:
        lines = [*LINES, {"kind": "summary", "step": 40}]
        with (run / "metrics.jsonl").open("w") as file:
            for line in lines:
                text = json.dumps(line) + "\n"
                for part in (text[:9], text[9:]):
                    file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                    time.sleep(0.1)

    thread = threading.Thread(target=train)
    thread.start()
    result = CliRunner().invoke(cli.app, ["watch", str(run)])
    thread.join()
    assert result.exit_code == 0
    first, *rows = result.output.splitlines()
    assert first == f"following {run}, 40 steps: a line for each log step", "before the run has written one"
    assert [line.split()[0] for line in rows] == ["step", "0", "10", "20"]


def test_where_ranks_are_now_is_read_from_what_they_record(tmp_path: Path) -> None:
    ranks = LiveRanks(tmp_path)
    assert ranks.lines() == []
    recorder = FlightRecorder(1, 2)
    recorder.events.extend_table(folder=str(tmp_path), units=["", "blocks.1"])
    (tmp_path / "flight").mkdir()
    live = {"pid": os.getpid(), "descriptor": recorder.descriptor, "boot": boot_id()}
    (tmp_path / "flight/rank-00001.live").write_text(json.dumps(live))
    recorder.events.step_done(7)
    recorder.events.phase("forward")
    recorder.events.unit_begins(1, "forward")
    assert ranks.lines() == ["rank 1    step 8  forward  blocks.1"]
    recorder.events.unit_ends(1)
    recorder.events.phase("backward")
    track = recorder.events.track("dp_shard", "all_gather", False)
    recorder.events.waits(track, 1)
    (line,) = ranks.lines()
    assert line.startswith("rank 1    step 8  backward  waits for all_gather since 0.")
    text = shown(LINES, ranks=[line])
    assert "\nnow\n  rank 1    step 8  backward  waits for" in text
    recorder.events.phase("end")
    assert ranks.lines() == [], "it has ended in order"


def test_ranks_that_come_later_are_seen_and_those_of_an_earlier_start_are_not(tmp_path: Path) -> None:
    (tmp_path / "flight").mkdir()

    def live(rank: int, step: int) -> FlightRecorder:
        recorder = FlightRecorder(rank, 2)
        recorder.events.extend_table(folder=str(tmp_path), units=[""])
        recorder.events.step_done(step)
        recorder.events.phase("forward")
        told = {"pid": os.getpid(), "descriptor": recorder.descriptor, "boot": boot_id()}
        (tmp_path / f"flight/rank-{rank:05}.live").write_text(json.dumps(told))
        return recorder

    ranks, first = LiveRanks(tmp_path), live(0, 7)
    assert ranks.lines() == ["rank 0    step 8  forward"]
    second = live(1, 7)
    assert ranks.lines() == ["rank 0    step 8  forward", "rank 1    step 8  forward"]
    again = live(0, 3)  # in the place of the first, which is gone
    assert ranks.lines() == ["rank 0    step 4  forward", "rank 1    step 8  forward"]
    (tmp_path / "flight/rank-00001.live").unlink()
    assert ranks.lines() == ["rank 0    step 4  forward"]
    for recorder in (first, second, again):
        recorder.close()


def test_lines_are_parsed_once_and_anew_only_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    texts = [json.dumps(line) + "\n" for line in LINES]
    path.write_text(texts[0] + texts[1][:20])
    growing = GrowingLines(path)
    before = growing.read()
    assert before == LINES[:1]
    path.write_text(texts[0] + texts[1] + texts[2])
    found = growing.read()
    assert found == LINES[:3]
    assert found[0] is before[0]
    assert growing.read() is found
    path.write_text(texts[0])
    assert growing.read() == LINES[:1]
    (tmp_path / "beside").write_text(texts[3] + texts[4])
    (tmp_path / "beside").replace(path)
    assert growing.read() == LINES[3:]


def test_lines_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    whole = record(10)
    others = [whole | other for other in ({"step_s": math.nan}, {"step_s": "x"}, {"steps": None}, {"step": "x"})]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*others, {"step": 3}, whole]))
    assert lines_of(path) == [whole]


@pytest.mark.parametrize(
    "strange",
    [
        record(30) | {"v": 2},
        logged(30, 4.0) | {"loss": None},
        {"kind": "validation", "step": 30, "loss": [4.0]},
        {"kind": "sample", "step": 30},
        {"kind": "restart", "step": 30, "number": 1},
    ],
)
def test_what_another_version_has_written_is_left_out_and_said(
    strange: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    texts = [json.dumps(line) + "\n" for line in [*LINES, strange]]
    path.write_text("".join(texts) + '{"kind": "st')
    assert run_lines(tmp_path) == LINES
    assert f"Left out: 1 line of '{path}', which another version" in capsys.readouterr().err
    path.write_text("".join(texts[:-1]) + '{"kind": "st')
    assert run_lines(tmp_path) == LINES
    assert not capsys.readouterr().err
    path.write_text(texts[-1])
    with pytest.raises(BadInput, match="This version cannot read 1 line"):
        run_lines(tmp_path)


def test_a_part_of_the_rows_has_the_columns_of_all() -> None:
    lines = [*LINES, logged(30, 4.0) | {"mfu": 0.5}, logged(40, 3.5)]
    header, *rows = rows_of(lines, 40, 80)
    assert rows_of(lines, 40, 80, first=3) == [header, *rows[2:]]
    assert rows_of(lines, 40, 80, first=len(lines)) == [header]
    assert rows_of(lines, 40, 80, most=2) == [header, *rows[-2:]]


@pytest.mark.parametrize("age_s", [60, 0])
def test_a_run_that_failed_ends_its_watch_once_nobody_starts_it_again(
    age_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("terrazzo.cli.watch"), "_FAILED_S", 30.0 if age_s else 0.2)
    run = write_run(tmp_path / "run", LINES)
    note = run / "exit.json"
    note.write_text(
        json.dumps({"code": 81, "reason": "stopped", "cause": "Rank 2 is stopped " + "x" * 90, "rank": 2, "step": 20})
    )
    os.utime(note, (time.time() - age_s,) * 2)
    done = CliRunner().invoke(cli.app, ["watch", str(run)])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "ended with exit code 81: Rank 2 is stopped " + "x" * 90


SLEEPS = """
import sys, time, torch, torch.distributed as dist, terrazzo as tz
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
model, _ = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", units=[])
tz.telemetry.attach(model, sys.argv[1], stall_s=None)
print("begun", flush=True)
time.sleep(100)
"""


@pytest.mark.processes
def test_a_run_that_was_killed_ends_its_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left who could say how it ended. While its process is there it is watched."""
    monkeypatch.setattr(import_module("terrazzo.cli.watch"), "_FAILED_S", 0.3)
    run = tmp_path / "run"
    rank = programs.Program("-c", SLEEPS, str(run))
    assert rank.stdout.readline() == "begun\n"
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        rank.send_signal(signal.SIGKILL)
        rank.wait(30)

    threading.Timer(1.5, kill).start()
    done = CliRunner().invoke(cli.app, ["watch", str(run)])
    assert killed, "not before"
    assert done.exit_code == 0
    assert done.output.splitlines()[-1].startswith("ended without a note of how: ")
    rank.close()


@pytest.mark.parametrize("other", [{}, {"boot": "another"}, {"pids": "pid:[1]"}], ids=["here", "machine", "container"])
def test_ranks_of_another_machine_or_container_are_not_known_to_be_gone(other: dict[str, str], tmp_path: Path) -> None:
    """Nor is one whose number another process has now; one that is there is another's."""
    (tmp_path / "flight").mkdir()
    here = {"pid": os.getpid(), "descriptor": 3, "boot": boot_id(), "pids": pid_namespace()}
    for birth, gone in ((birth_of(os.getpid()), False), ("7", not other)):
        (tmp_path / "flight/rank-00000.live").write_text(json.dumps(here | other | {"birth": birth}))
        assert ranks_are_gone(tmp_path) == gone
    (tmp_path / "flight/rank-00001.live").write_text(json.dumps(here | {"birth": birth_of(os.getpid())}))
    assert not ranks_are_gone(tmp_path), "one of two"


def test_a_run_that_ended_in_order_needs_no_word_of_how(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LINES)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*LINES, {"kind": "summary", "step": 20}])
    )
    note = run / "exit.json"
    note.write_text(json.dumps({"code": 0, "reason": "done", "cause": "all steps are done", "rank": None, "step": 20}))
    os.utime(note, (time.time() - 60,) * 2)
    done = CliRunner().invoke(cli.app, ["watch", str(run)])
    assert done.exit_code == 0
    assert "ended with" not in done.output


def test_a_pipe_gets_the_steps_again_that_a_run_takes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume cuts metrics.jsonl back to the step of its checkpoint; other losses may follow there."""
    run = write_run(tmp_path / "run", LINES)
    (run / "config.json").write_text(json.dumps(settings(train={"steps": 40})))
    again = [*LINES[:3], logged(20, 4.0)]
    writes = iter([again, [*again, logged(30, 3.5), {"kind": "summary", "step": 40}]])

    def next_write(seconds: float) -> None:
        if (lines := next(writes, None)) is not None:
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr("time.sleep", next_write)
    result = CliRunner().invoke(cli.app, ["watch", str(run)])
    rows = [line.split()[:2] for line in result.output.splitlines()[2:]]
    assert [step for step, _ in rows] == ["0", "10", "20", "20", "30"]
    assert [loss for _, loss in rows[1:]] == ["4.5000", "4.2500", "4.0000", "3.5000"]
