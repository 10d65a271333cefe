"""Ranks that others have started: who looks after them, what is kept before they end, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from terrazzo.exit_codes import FAILED, STALLED
from terrazzo.telemetry import FlightRecorder, flights_of
from terrazzo.telemetry.flight.ring import EventKind
from terrazzo.telemetry.watchdog import watched_rank
from terrazzo.telemetry.watchdog.watchdog import Patience
from tests.helpers import programs
from tests.helpers.cover import mostly_long
from tests.helpers.processes import Pool

pytestmark = pytest.mark.processes

LOOP = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
import terrazzo as tz
from terrazzo.telemetry.watchdog import watched_rank

how, folder, stall_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[4:]:
    watched_rank._machine = lambda: f"machine {rank}"
os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}.json")
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = tz.shard(model, optimizer, plan="zero3", units=[torch.nn.Linear])
if how == "busy":
    signal.signal(signal.SIGUSR2, lambda *_: None)
telemetry = tz.telemetry.attach(model, folder, stall_s=stall_s)

def until(true):
    while not true():
        time.sleep(0.02)

def link(fd):
    try:
        return os.readlink(fd)
    except OSError:  # it has been closed meanwhile
        return ""

def looked_after():
    found = [Path(f"/proc/{process.pid}/fd").glob("*") for process in watched_rank._started]
    return any(sum("terrazzo-threads" in link(fd) for fd in fds) >= (1 if sys.argv[4:] else 2) for fds in found)

def act():
    if how == "stopped" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how in ("stuck", "busy") and rank == 1:
        threading.Event().wait(60)
    elif how == "killed" and rank == 0:
        until(looked_after)
        (folder / "ready").touch()
        until((folder / "stall/rank-1.txt").exists)
    elif how == "killed":
        until((folder / "ready").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "closed":
        os.kill(os.getpid(), signal.SIGUSR2)  # as from a warden that had begun to ask
        time.sleep(1)

until(lambda: not sys.argv[4:] or looked_after())
for step in range(1, 4):
    if how == "closed" and step == 3:
        until(lambda: rank or looked_after())
        dist.barrier()
        telemetry.close()
    loss = model(torch.ones(2, 8)).sum()
    if step == 3:
        act()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "patient" and step == 2:
        time.sleep(1.5 * rank)  # such as a checkpoint that rank 1 alone writes to a network, while rank 0 waits
        with torch.no_grad():
            model(torch.ones(2, 8))
        time.sleep(0.8 * rank)
"""

Done = subprocess.CompletedProcess[str]


def train(folder: Path, how: str, stall_s: float = 0.5) -> list[Done]:
    return programs.on_ranks(2, "-c", LOOP, how, str(folder), str(stall_s))


def steps_of(folder: Path) -> list[list[int]]:
    return [[told.ordinal for told in each.events if told.kind == EventKind.STEP] for each in flights_of(folder)]


def test_a_stopped_rank_is_named_and_all_is_kept_before_the_others_end_with_a_code_of_their_own(tmp_path: Path) -> None:
    first, second = train(tmp_path, "stopped")
    assert (first.returncode, second.returncode) == (STALLED, -signal.SIGKILL), first.stderr
    said = re.search(
        r"Rank 1 \(host .+, pid \d+\) is stopped \(SIGSTOP\)\. Missing from all_gather \d+ on dp_shard, unit \d,"
        r" backward, step 3\. Rank 0 has waited \d+ s\.\nAll ranks are ended, with exit code 81\.",
        first.stderr,
    )
    assert said is not None, first.stderr
    assert {path.name for path in (tmp_path / "stall").iterdir()} == {"rank-0.txt", "rank-1.txt", "stall.txt"}
    assert "in wait" in (tmp_path / "stall/rank-0.txt").read_text()  # the frames of its main thread
    assert steps_of(tmp_path) == [[1, 2], [1, 2]]
    assert "is stopped" in json.loads((tmp_path / "error-0.json").read_text())["message"]["message"]
    note = json.loads((tmp_path / "exit.json").read_text())
    assert (note["code"], note["reason"], note["rank"], note["step"]) == (
        STALLED,
        "stopped",
        1,
        2,
    ) and "is stopped" in note["cause"]


@pytest.mark.parametrize("how", mostly_long(["stuck", "busy"], "busy"))
def test_a_rank_that_does_nothing_in_a_step_shows_where_it_is_also_where_the_script_has_the_signal(
    tmp_path: Path, how: str
) -> None:
    done = train(tmp_path, how)
    assert [each.returncode for each in done] == [STALLED, STALLED], done[0].stderr
    assert re.search(r"Rank 1 .* does nothing, and waits for no other rank\. Missing from", done[0].stderr)
    assert "in act" in (tmp_path / "stall/rank-1.txt").read_text()


def test_a_killed_rank_is_named_and_leaves_its_records(tmp_path: Path) -> None:
    first, second = train(tmp_path, "killed")
    assert second.returncode == -signal.SIGKILL
    assert re.search(r"Rank 1 \(host .+, pid \d+\) has ended\. Last in phase forward, step 3\.", first.stderr), first
    assert steps_of(tmp_path) == [[1, 2], [1, 2]]
    note = json.loads((tmp_path / "exit.json").read_text())
    # Rank 0 is ended where it does not hear of it by itself, and may hear of it while it is being ended.
    assert note["code"] in ({STALLED} if first.returncode == STALLED else {FAILED, STALLED})
    assert (note["reason"], note["rank"], note["step"]) == ("died", 1, 2) and "has ended" in note["cause"]


def test_what_a_loop_does_between_steps_may_last(tmp_path: Path) -> None:
    done = train(tmp_path, "patient", stall_s=0.25)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert not (tmp_path / "stall").exists()
    assert "Rank 1" not in done[0].stderr or "between steps, in code of your own, and is not ended" in done[0].stderr


def test_a_loop_goes_on_unwatched_after_close(tmp_path: Path) -> None:
    done = train(tmp_path, "closed", stall_s=0.25)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert not (tmp_path / "stall").exists()


def test_a_rank_that_is_stopped_on_another_machine_is_named_on_both_and_all_ranks_are_ended(tmp_path: Path) -> None:
    """Two machines, as far as the ranks are told: each has a warden of its own."""
    first, second = programs.on_ranks(2, "-c", LOOP, "stopped", str(tmp_path), "0.5", "apart")
    assert second.returncode == -signal.SIGKILL
    assert first.returncode in (STALLED, FAILED), first.stderr  # on a busy machine it may see rank 1 gone before
    for done in (first, second):
        said = r"Rank 1 \(host .+, pid \d+\) is stopped \(SIGSTOP\)\. Missing from all_gather \d+ on dp_shard, unit \d"
        assert re.search(said, done.stderr), done.stderr
    assert {path.name for path in (tmp_path / "stall").iterdir()} == {"rank-0.txt", "rank-1.txt", "stall.txt"}


def test_a_warden_can_be_told_of_thousands_of_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment variable holds 128 KiB (Linux, MAX_ARG_STRLEN), and a larger one starts no process."""
    places = [[f"gpu-node-{number}.cluster", "10.0.0.1", 40_000 + number, [number]] for number in range(5000)]
    task = {"places": places, "ranks": [], "patience": [20, 600, True]}
    reads = "import os, sys; from pathlib import Path; sys.stdout.write(os.environ['TERRAZZO_WARDEN'])"
    told: list[object] = []
    real = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        told.append(watched_rank.task_of(os.dup(int(options["env"][watched_rank.TASK]))))
        return real([sys.executable, "-S", "-c", reads], **options)

    monkeypatch.setattr(subprocess, "Popen", started)
    watched_rank._start(task, None)
    assert told == [{**task, "listener": -1}]
    assert watched_rank._started.pop().wait() == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/python")
    monkeypatch.setattr(subprocess, "Popen", real)
    watched_rank._start(task, None)
    assert "Nobody looks whether ranks stand still" in capsys.readouterr().err


def test_ranks_on_several_machines_are_looked_after_by_a_warden_on_each(two_processes: Pool) -> None:
    assert two_processes.run(looked_after, False) == [True, True]
    assert two_processes.run(looked_after, True) == [True, True]


def looked_after(apart: bool) -> bool:
    before, recorder = watched_rank._machine, FlightRecorder(dist.get_rank(), 2)
    if apart:
        watched_rank._machine = lambda: f"machine {dist.get_rank()}"
    try:
        leave = watched_rank.look_after(recorder, Patience(20, 600))
    finally:
        watched_rank._machine = before
    if leave is not None:
        leave()
    recorder.close()
    return leave is not None
