"""How ranks start and how a run ends when one of them fails: real processes, so only as many as needed."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from terrazzo.config import Config, LaunchConfig, config_from_dict
from terrazzo.engine.runtime import topology
from terrazzo.errors import BadInput
from terrazzo.launch.environment import adopt_slurm, first_host, is_rank, library_settings
from terrazzo.launch.launcher import local_ranks
from terrazzo.launch.launcher.local_ranks import LaunchSpec, LocalRank, LocalRanks
from terrazzo.launch.launcher.run_end import RanksAtEnd, report_end
from terrazzo.launch.launcher_pipe import Failure, Milestone, cause_of, first_failure
from terrazzo.launch.machine import ranks_to_start, resolve_device, set_threads
from terrazzo.launch.rank.process_group import _agree_on_device, join
from terrazzo.launch.stopping.received_signals import ReceivedSignals
from terrazzo.telemetry.watchdog.watchdog import Patience
from tests.helpers import programs
from tests.helpers.threads import run_in_threads

RANK = """
import os, sys, time, torch, torch.distributed as dist
from terrazzo.engine.runtime import topology
from terrazzo.errors import BadInput
from terrazzo.launch.rank.rank_process import RankProcess
rank = int(os.environ["RANK"])

def work():
    dist.init_process_group("gloo")
    if sys.argv[1] == "bad input":
        raise BadInput("The value 7 is not a fruit: use an apple.")
    if sys.argv[1] == "stopped":
        if rank == 1:
            os.kill(os.getpid(), 19)
        await_stopped()
        explode()
    if rank == 1:
        os.kill(os.getpid(), 9) if sys.argv[1] == "killed" else explode()
    dist.all_reduce(torch.ones(1))
    return 0

def await_stopped():
    with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
        stats = [f"/proc/{pid}/stat" for pid in file.read().split()]
    while not any(open(stat).read().rpartition(")")[2].split()[0] == "T" for stat in stats):
        time.sleep(0.01)

def explode():
    raise ZeroDivisionError("the cause of it all")

RankProcess(rank).run(work)
"""

LAUNCH = """
import sys
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.start_ranks import launch_ranks
sys.exit(launch_ranks(LaunchSpec(2, sys.argv[1:])))
"""


def launch(tmp_path: Path, how: str) -> tuple[subprocess.CompletedProcess[str], float]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    start = time.monotonic()
    done = programs.run("-c", LAUNCH, str(script), how, env={**environment, "OMP_NUM_THREADS": "1"})
    return done, time.monotonic() - start


IDLE = """
import os, sys, time
open(f"{sys.argv[1]}/rank.{os.getpid()}", "w").close()
time.sleep(300)
"""


@pytest.mark.processes
def test_a_killed_launcher_leaves_no_rank_and_no_folder(tmp_path: Path) -> None:
    """From the ranks' first moment: these import nothing, and would sleep on."""
    (tmp_path / "rank.py").write_text(IDLE)
    (tmp_path / "temporary").mkdir()
    words = ("-c", LAUNCH, str(tmp_path / "rank.py"), str(tmp_path))
    launcher = programs.Program(*words, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("rank.[0-9]*"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(120)
    launcher.close()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{path.suffix[1:]}").exists() for path in tmp_path.glob("rank.[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found
    assert list((tmp_path / "temporary").glob("*terrazzo-*")) == []


@pytest.mark.processes
def test_the_first_failing_ranks_traceback_is_on_screen_and_the_sentence_that_names_it_last(tmp_path: Path) -> None:
    done, took_s = launch(tmp_path, "raise")
    assert done.returncode == 1
    *trace, _, sentence = done.stderr.rstrip().splitlines()
    assert trace[-1] == "ZeroDivisionError: the cause of it all"
    assert "Rank 1 failed first:" in trace
    assert sentence == "Rank 1 failed first: ZeroDivisionError: the cause of it all"
    assert took_s < 120


@pytest.mark.processes
def test_bad_input_on_every_rank_is_said_once_with_its_own_exit_code(tmp_path: Path) -> None:
    done, _ = launch(tmp_path, "bad input")
    assert done.returncode == 2
    assert done.stderr.count("The value 7 is not a fruit: use an apple.") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    done, took_s = launch(tmp_path, "killed")
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert "Rank 1" in last
    assert "SIGKILL" in last
    assert took_s < 120


@pytest.mark.processes
def test_a_stopped_rank_is_named_beside_what_has_failed_by_it(tmp_path: Path) -> None:
    done, took_s = launch(tmp_path, "stopped")
    assert done.returncode == 1
    failed, _, stopped = done.stderr.partition("ZeroDivisionError: the cause of it all\n\n")
    assert "Rank 0 failed first" in failed
    assert re.match(r"Rank 1 \(process \d+\) was stopped by a signal when that happened", stopped)
    assert "SIGKILL" not in done.stderr
    assert took_s < 120


def test_a_rank_that_is_on_its_way_out_is_left_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others fail by its closed connections before it has an exit code: it must not look as if it was ended."""
    monkeypatch.setattr(local_ranks, "is_ending", lambda pid: True)
    (tmp_path / "rank.py").write_text("import time; time.sleep(0.5); raise SystemExit(7)")
    with LocalRanks(LaunchSpec(1, [str(tmp_path / "rank.py")]), {}) as started:
        pass
    (rank,) = started.ranks
    assert (rank.code, rank.ended_by_us) == (7, False)


def test_ranks_that_nobody_can_look_after_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LocalRank] = []

    def watchdog(ranks: Any, patience: Patience) -> None:
        raise OSError("no watchdog")

    def end(self: LocalRanks) -> None:
        started.extend(self.ranks)
        real_end(self)

    real_end = LocalRanks.end
    monkeypatch.setattr(local_ranks, "Watchdog", watchdog)
    monkeypatch.setattr(LocalRanks, "end", end)
    (tmp_path / "rank.py").write_text("import time; time.sleep(60)")
    with pytest.raises(OSError, match="no watchdog"):
        LocalRanks(LaunchSpec(2, [str(tmp_path / "rank.py")]), {}, patience=Patience(20.0, 60.0))
    assert [(rank.code, rank.ended_by_us) for rank in started] == [(-signal.SIGKILL, True)] * 2


def test_nobody_is_told_of_a_stop_where_a_rank_has_failed(tmp_path: Path) -> None:
    """The signal comes in the seconds that other ranks have to fail, too: there is nothing left to stop."""
    (tmp_path / "rank.py").write_text(FAILING)
    asked: list[str] = []
    with LocalRanks(LaunchSpec(1, [str(tmp_path / "rank.py")]), {}) as started:
        while not started.ranks[0].failed:
            started._listen(0.1)
        signals: Any = SimpleNamespace(received=[signal.SIGTERM])
        assert started.wait(signals, lambda: asked.append("asked")) is None
    assert not asked


FAILING = """
import os, time
from terrazzo.launch.launcher_pipe import REPORT, Failure, LauncherPipe, Milestone
launcher = LauncherPipe(int(os.environ[REPORT]))
launcher.reach(Milestone.READY)
launcher.fail(Failure(0, time.monotonic_ns(), 2, "not a fruit"), ValueError())
time.sleep(60)
"""


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT])
def test_a_closed_terminal_is_no_second_signal(first: int) -> None:
    """The shell and the kernel each say that it is closed, perhaps after Ctrl-C."""
    signals = ReceivedSignals()
    try:
        for number in (first, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.received == [first]
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [first, signal.SIGTERM]
    finally:
        signals.restore()


def test_the_earliest_failure_is_the_first() -> None:
    assert first_failure([None]) is None
    failures = [Failure(rank, time_ns, 1, f"rank {rank}") for rank, time_ns in ((0, 200), (1, 100), (2, 300))]
    found = first_failure([None, *failures])
    assert found is not None
    assert found.rank == 1


class Ended(NamedTuple):
    """A rank, as far as it is reported on."""

    rank: int
    code: int
    failure: Failure | None = None
    ended_ns: int = 0
    ended_by_us: bool = False
    stopped: bool = False
    reached: frozenset[Milestone] = frozenset()
    at: str = ""
    step: int | None = None


S = 10**9
CAUSE = Ended(0, 1, Failure(0, 100 * S, 1, "ZeroDivisionError: the cause"), 101 * S)
REFUSAL = Ended(0, 2, Failure(0, 100 * S, 2, "not a fruit"), 101 * S)
LOST = "Traceback (most recent call last):\n  ...\nConnectionLost: Rank 1 has ended or failed"
BEREFT = Ended(0, 1, Failure(0, 97 * S, 1, LOST, LOST.splitlines()[-1], lost=True), 97 * S)
WORDS = {
    "killed": "Rank 1 was ended by SIGKILL (often the kernel's out-of-memory killer, whose count cannot be read here);"
    " the other ranks were stopped.",
    "cause": "Rank 0 failed first:\nZeroDivisionError: the cause",
    "follows": "Rank 0 failed as well:\nZeroDivisionError: the cause",
    "refusal": "not a fruit",
    "lost": f"Rank 0 has lost another rank:\n{LOST}",
    "in peace": "Rank 1 ended before that with exit code 0, and no rank has failed by itself.",
    "asked": "Rank 1 ended before that with exit code 75, and no rank has failed by itself.",
    "other": "Rank 1 failed first:\nKeyError: 'x'",
}


@pytest.mark.parametrize(
    ("ranks", "said", "code"),
    [
        ([CAUSE, Ended(1, -9, ended_ns=103 * S)], ["killed", "cause"], 1),
        ([REFUSAL, Ended(1, -9, ended_ns=103 * S)], ["killed", "refusal"], 2),
        ([CAUSE, Ended(1, -9, ended_ns=98 * S)], ["follows", "killed"], 1),
        ([CAUSE, Ended(1, -9, ended_ns=100 * S + S // 20)], ["follows", "killed"], 1),  # seen a little late
        ([CAUSE, Ended(1, -9, ended_ns=98 * S), Ended(2, -11, ended_ns=99 * S)], ["follows", "killed"], 1),
        ([Ended(0, -15, ended_by_us=True), Ended(1, -9)], ["killed"], 1),
        ([CAUSE, Ended(1, -9, ended_ns=103 * S, ended_by_us=True)], ["cause"], 1),
        ([Ended(0, 75), Ended(1, 75)], [], 75),
        ([BEREFT, Ended(1, -9, ended_ns=103 * S)], ["killed"], 1),  # what a rank was lost to is seen late
        ([BEREFT, Ended(1, 1, Failure(1, 99 * S, 1, "KeyError: 'x'"), 99 * S)], ["other"], 1),
        ([BEREFT, Ended(1, 0, ended_ns=96 * S)], ["lost", "in peace"], 1),
        ([BEREFT, Ended(1, 75, ended_ns=96 * S)], ["lost", "asked"], 1),
    ],
)
def test_a_death_and_a_failure_are_both_said_the_first_one_last(
    ranks: list[Any], said: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_end(RanksAtEnd(ranks)).code == code
    assert capsys.readouterr().err.strip() == "\n\n".join(WORDS[name] for name in said)


def test_the_sentence_behind_a_traceback_has_where_that_rank_was(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure(0, 100 * S, 1, "Traceback (most recent call last):\n  ...\nValueError: no", "ValueError: no")
    ranks: list[Any] = [
        Ended(0, 1, failure, 101 * S, at=", in phase forward of step 9"),
        Ended(1, -15, ended_by_us=True),
    ]
    report_end(RanksAtEnd(ranks))
    assert capsys.readouterr().err.endswith("\n\nRank 0 failed first, in phase forward of step 9: ValueError: no\n")


CUDA_ERROR = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(CUDA_ERROR), "RuntimeError: CUDA error: out of memory"),
        (SyntaxError("invalid syntax", ("a.py", 1, 1, "a b", 1, 2)), "SyntaxError: invalid syntax"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_cause_of_a_failure_is_the_first_line_of_its_message(
    error: Exception, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(traceback.format_exception(error)).rstrip()
    ranks: list[Any] = [Ended(0, 1, Failure(0, 100 * S, 1, text, cause_of(error)), 101 * S)]
    assert report_end(RanksAtEnd(ranks)).why == f"rank 0 failed: {cause}"
    assert capsys.readouterr().err.endswith(f"\n\nRank 0 failed first: {cause}\n")


def test_a_death_by_a_signal_without_a_name_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    ranks: list[Any] = [Ended(0, -(signal.SIGRTMIN + 1))]
    assert report_end(RanksAtEnd(ranks)).code == 1
    assert "Rank 0 was ended by SIGRTMIN+1;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("oom_kills", "said"),
    [
        (0, "not by the kernel's out-of-memory killer, which has ended nothing here"),
        (2, "the kernel's out-of-memory killer, which has ended 2 here since the start"),
    ],
)
def test_the_kernels_count_says_whether_memory_ran_out(
    oom_kills: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: list[Any] = [CAUSE, Ended(1, -9, ended_ns=98 * S)]
    assert report_end(RanksAtEnd(ranks, oom_kills=oom_kills)).code == 1
    assert f"Rank 1 was ended by SIGKILL ({said});" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-007,9],login", "gpu003"),
        ("alone", "alone"),
        ("a1,a2", "a1"),
        ("rack2-n[12,14]", "rack2-n12"),
        ("n[1-2]-ib,m3", "n1-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_slurm_task_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # registers the name, so that what is set below is undone
        monkeypatch.delenv(name)
    slurm = {"PROCID": "5", "STEP_ID": "3", "STEP_NUM_TASKS": "8", "LOCALID": "1", "JOB_ID": "12345"}
    slurm |= {"STEP_TASKS_PER_NODE": "4(x2)", "STEP_NODELIST": "n[07-08]"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    adopt_slurm()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["5", "8", "1", "4", "n07", "16418"]


@pytest.mark.parametrize(
    ("told", "node", "here"),
    [("4,2", 0, 4), ("4,2", 1, 2), ("3(x2),1", 1, 3), ("3(x2),1", 2, 1), ("2(x3)", 2, 2), ("8", 0, 8)],
)
def test_a_slurm_task_counts_the_ranks_of_its_own_node(
    told: str, node: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    slurm = {"PROCID": "0", "STEP_ID": "0", "STEP_NUM_TASKS": "8", "STEP_TASKS_PER_NODE": told, "NODEID": str(node)}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    adopt_slurm()
    assert os.environ["LOCAL_WORLD_SIZE"] == str(here)


def test_a_slurm_task_that_is_not_told_who_is_on_its_node_asks_the_job_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"PROCID": "5", "STEP_ID": "0", "STEP_NUM_TASKS": "8", "NODEID": "1", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(BadInput, match=r"one of 8 tasks of Slurm.*SLURM_TASKS_PER_NODE"):
        adopt_slurm()
    assert not is_rank()
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    adopt_slurm()
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_that_is_told_half_of_where_it_is_is_refused(
    missing: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all ranks would take the first GPU, or each all of the CPUs."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(BadInput, match=rf"RANK and WORLD_SIZE are set, and {missing} is not.*torchrun"):
        join(LaunchConfig(device=device, timeout_s=1))


def test_ranks_with_other_kinds_of_devices_are_refused() -> None:
    def body(rank: int) -> str:
        with pytest.raises(BadInput) as caught:
            _agree_on_device("cpu" if rank == 1 else "cuda")
        return str(caught.value)

    said = run_in_threads(3, body)
    assert len(set(said)) == 1
    assert said[0].startswith("launch.device is cuda on rank 0 and cpu on rank 1: ")
    run_in_threads(2, lambda rank: _agree_on_device("cpu"))


def test_a_lone_slurm_task_starts_the_ranks_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PROCID": "0", "STEP_ID": "3", "STEP_NUM_TASKS": "1", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    adopt_slurm()
    assert not is_rank()


def test_an_sbatch_script_itself_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEPID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    adopt_slurm()
    assert "RANK" not in os.environ


def test_ranks_on_gpus_get_segments_that_grow_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    assert library_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert library_settings() == {}


def test_threads_of_ranks_do_not_spin_on_cores_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    assert library_settings()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in library_settings()


STARTED = """
import os, sys, types
os.getloadavg = lambda: (1e4, 0.0, 0.0)
def begin(*_):
    names = "GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS"
    print("torch" in sys.modules, *(os.environ.get(name) for name in names))
    sys.exit(0)
for home, name in (("start_trainer", "start_training"), ("trainer_rank", "train_as_rank")):
    sys.modules["terrazzo.train." + home] = module = types.ModuleType("terrazzo.train." + home)
    setattr(module, name, begin)
import terrazzo.train
sys.argv[1:] = ["train", "a.json"]
from terrazzo.cli import main
main()
"""


@pytest.mark.parametrize("started", [{}, {"RANK": "1", "WORLD_SIZE": "2"}], ids=["alone", "by another program"])
@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}])
def test_all_that_trains_has_these_settings_before_it_imports_torch_whoever_has_started_it(
    tmp_path: Path, own: dict[str, str], started: dict[str, str]
) -> None:
    """The allocator and libgomp read them once, and the same run computes alike under torchrun and without it."""
    (tmp_path / "a.json").write_text('{"train": {"steps": 9}}')
    names = ("OMP_WAIT_POLICY", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= own | started
    words = [sys.executable, "-c", STARTED]
    said = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    spins, segments = own.values() or ("1000", "expandable_segments:True")
    assert said.stdout == f"False {spins} {segments} None\n"


@pytest.mark.parametrize(
    ("value", "run", "threads"),
    [("1", None, 1), ("3,2", None, 3), ("1", "terrazzo", 1), ("1", "none", 2), ("3", "none", 3), ("x", None, 2)],
    ids=["the user's", "nested", "our launcher's", "torchrun's", "the user's under torchrun", "no number"],
)
def test_threads_that_the_user_has_set_are_heeded(
    monkeypatch: pytest.MonkeyPatch, value: str, run: str | None, threads: int
) -> None:
    """That of torchrun is 1 for each of several ranks, whatever the machine has, and nobody's wish."""
    taken: list[int] = []
    monkeypatch.setattr(topology, "cpus_of_a_rank", lambda ranks: 2)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    set_threads(LaunchConfig(), 2)
    set_threads(LaunchConfig(threads=7), 2)
    assert taken == [threads, 7]


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert ranks_to_start(Config()) == 1
    assert ranks_to_start(config_from_dict({"launch": {"ranks": 4}})) == 4
    with pytest.raises(BadInput, match=r"launch\.device=cpu"):
        resolve_device(LaunchConfig(device="cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(BadInput, match=r"launch\.ranks=2"):
        ranks_to_start(config_from_dict({"launch": {"ranks": 4}}))


@pytest.mark.parametrize(
    ("bound", "container", "quota", "ranks", "threads"),
    [(4, 4, math.inf, 2, 2), (4, 4, math.inf, 8, 1), (64, 128, math.inf, 2, 64), (128, 128, 4.0, 2, 2)],
    ids=["a cpuset", "more ranks than CPUs", "CPUs of its own", "a quota"],
)
def test_a_rank_takes_its_share_of_the_container_and_not_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, bound: int, container: int, quota: float, ranks: int, threads: int
) -> None:
    taken: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(topology, "allowed_cpus", lambda: frozenset(range(bound)))
    monkeypatch.setattr(topology, "container_cpus", lambda root: frozenset(range(container)))
    monkeypatch.setattr(topology, "container_quota", lambda root: quota)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    set_threads(LaunchConfig(), ranks)
    set_threads(LaunchConfig(threads=7), ranks)
    assert taken == [threads, 7]
