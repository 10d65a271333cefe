"""Ranks that are started again after a failure: to the same bits, told of, and not for ever."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terrazzo.config import LaunchConfig
from terrazzo.errors import BadInput
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.restart_policy import RestartPoint, RestartPolicy
from terrazzo.launch.launcher.run_end import RanksAtEnd, RunEnd, report_end
from terrazzo.launch.launcher.start_ranks import launch_ranks
from terrazzo.launch.rank.restart_note import Restart, refuse_restarts, take_restart_note
from terrazzo.launch.stopping.notices import Notices
from terrazzo.train.checkpoints.restart_points import restarts_of
from tests.helpers import programs
from tests.train.test_loop import command, curve, environment, metrics, one_rank_of
from tests.train.test_session import config_in, trained

FAILED = RunEnd(1, "Rank 1 was ended by SIGKILL", lasts=False)
START = LaunchSpec(2, ["words"])


class Told:
    """A `RestartPolicy` whose checkpoints are given, one for each failure."""

    def __init__(self, most: int, *steps: int) -> None:
        saved: Iterator[RestartPoint] = iter([RestartPoint(step, f"step-{step}" if step else "") for step in steps])
        self.said: list[str] = []
        self.again = RestartPolicy(most, lambda: next(saved), self.words, self.said.append)

    def words(self, saved: RestartPoint) -> Sequence[str]:
        return [f"from {saved.step}"]

    def after(self, ended: RunEnd = FAILED) -> LaunchSpec | None:
        return self.again.after(START, ended)


def test_each_restart_goes_on_from_the_newest_checkpoint_and_ranks_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(2, 0, 3)
    for number, step in ((1, 0), (2, 3)):
        start = told.after()
        assert start is not None
        assert (start.ranks, start.words) == (2, [f"from {step}"])
        for name, value in start.environment.items():
            monkeypatch.setenv(name, value)
        assert take_restart_note() == Restart(number, 2, FAILED.why)
        assert take_restart_note() is None, "what a rank starts is not this rank"
    assert told.said == [
        "restart 1 of 2: starting 2 ranks again, from the beginning: there is no checkpoint yet",
        "restart 2 of 2: starting 2 ranks again, from step-3",
    ]


def test_ranks_that_are_started_again_keep_the_environment_of_the_first_start() -> None:
    told, start = Told(2, 1, 2), LaunchSpec(2, ["words"], {"MINE": "kept"})
    for _ in range(2):
        following = told.again.after(start, FAILED)
        assert following is not None
        assert following.environment["MINE"] == "kept"
        start = following


def test_no_more_than_that(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(2, 1, 2, 3)
    assert told.after() is not None and told.after() is not None
    assert told.after() is None
    assert capsys.readouterr().err == "\nNot started again: launch.restarts is 2.\n"


@pytest.mark.parametrize(("steps", "at"), [((3, 3), "the newest is step-3"), ((0, 0), "there is none")])
def test_two_failures_without_a_checkpoint_in_between_end_it_with_the_first_one_named(
    steps: tuple[int, int], at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(9, *steps)
    assert told.after() is not None
    assert told.after(RunEnd(1, "rank 0 failed: ConnectionError", lasts=False)) is None
    assert capsys.readouterr().err == (
        f"\nNot started again: no checkpoint was saved since the failure before ({at}), which was: {FAILED.why}.\n"
    )


def test_what_no_restart_mends_is_not_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert Told(9, 3).after(RunEnd(2, "rank 0 failed: Error: no fruit", lasts=True)) is None
    assert capsys.readouterr().err == "\nNot started again: it would end so again.\n"


def test_what_cannot_be_said_changes_nothing_of_what_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = SimpleNamespace(rank=0, code=81, ended_ns=1, failure=None, ended_by_us=False, reached=(), step=None)
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert report_end(RanksAtEnd([rank])).code == 81
        assert Told(9, 3).after(RunEnd(2, "rank 0 failed", lasts=True)) is None
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


CLAIMS = """
import json, os, sys
folder, first = sys.argv[1], f"{sys.argv[1]}/second"
if not os.path.exists(first):
    open(first, "w").close()
    for milestone in ("ready", "claimed"):
        os.write(int(os.environ["TERRAZZO_REPORT"]), json.dumps({"reached": milestone}).encode() + b"\\n")
    os._exit(7)
os._exit(9)
"""


def test_the_end_of_ranks_that_were_started_again_is_heard_of_though_they_have_claimed_nothing(tmp_path: Path) -> None:
    """The run's folders are its own since its first start, and what was noted of that is not how the run has ended."""
    (tmp_path / "rank.py").write_text(CLAIMS)
    heard: list[int | str] = []
    notices = Notices("", str, on_end=lambda end: heard.append(end.code), on_restart=lambda: heard.append("again"))
    start = LaunchSpec(1, [str(tmp_path / "rank.py"), str(tmp_path)])
    restarts = RestartPolicy(1, lambda: RestartPoint(1, "step-1"), lambda saved: start.words, lambda line: None)
    assert launch_ranks(start, notices=notices, restarts=restarts) == 9
    assert heard == [7, "again", 9]


# -- what a run goes on from ---------------------------------------------------------------------------------------


def test_a_run_begun_anew_goes_on_from_its_own_checkpoints_alone(tmp_path: Path) -> None:
    launch = {"restarts": 1}
    assert trained(config_in(tmp_path, train={"steps": 3})) == 0
    anew = config_in(tmp_path, launch=launch, checkpoint={"resume": "never", "overwrite": True})
    again = restarts_of(anew, ["words"])
    assert again._newest() == RestartPoint(), "what is there is of another run"
    assert trained(anew) == 0
    saved = again._newest()
    assert (saved.step, Path(saved.path).name) == (4, "step-00000004")
    assert again._words(saved) == ["words", "checkpoint.resume=if_exists"]
    assert again._words(RestartPoint()) == ["words"]


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path: Path) -> None:
    config = config_in(tmp_path, launch={"restarts": 1})
    assert trained(config) == 0
    again = restarts_of(config, ["words"])
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="held a checkpoint when this run began, and holds none now"):
        again._newest()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun has started these ranks, .*torchrun does so by --max-restarts 2"),
        ({"SLURM_PROCID": "0"}, "Slurm has started these ranks, .*Slurm does so by sbatch --requeue"),
        ({"TORCHELASTIC_RUN_ID": "terrazzo"}, r"`terrazzo run` has started .*start them again\. Use launch.restarts=0"),
        ({}, r"whoever set RANK has started .*start them again\. Use launch.restarts=0"),
    ],
)
def test_others_start_their_ranks_again_themselves(
    told: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=rf"launch\.restarts is 2, but {said}"):
        refuse_restarts(LaunchConfig(restarts=2))
    with pytest.raises(BadInput, match=r"Use launch\.restarts=0 launch\.ranks=null here"):
        refuse_restarts(LaunchConfig(restarts=2, ranks="2:4"))
    refuse_restarts(LaunchConfig())


# -- real ranks ----------------------------------------------------------------------------------------------------


STEPS = [
    "model.dropout=0",
    "model.layers=1",
    "train.steps=20",
    "train.eval_every=null",
    "train.sample_tokens=0",
    "checkpoint.every=5",
]


LAUNCHER = """
import sys
from pathlib import Path
from terrazzo.config import load_config
from terrazzo.train import start_trainer
from terrazzo.launch.launcher import local_ranks

local_ranks.SIBLING_GRACE_S = 1.0
LaunchSpec, again = start_trainer.LaunchSpec, start_trainer.restarts_of
start_trainer.LaunchSpec = lambda ranks, words: LaunchSpec(ranks, [sys.argv[1], *words[2:]])
start_trainer.restarts_of = lambda config, words: again(config, [sys.argv[1], *words[2:]])
path, words = Path(sys.argv[3]), sys.argv[4:]
sys.exit(start_trainer.start_training(load_config(path, words), path, words))
"""
"""`terrazzo train` whose ranks run another program."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has happened to, on ranks that nobody starts again."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for done in programs.on_ranks(2, *command(folder, *STEPS)):
        assert done.returncode == 0, done.stderr
    return folder


def killed_by(launcher: programs.Program, number: signal.Signals, behind_step: int) -> subprocess.CompletedProcess[str]:
    """The launcher's end, once its last rank has had a signal behind a step."""
    for line in launcher.stdout:
        if re.match(rf" +{behind_step} +\d+\.\d{{4}}", line):
            break
    os.kill(one_rank_of(launcher), number)
    return launcher.communicate(90)


def weights(folder: Path) -> dict[str, bytes]:
    """And what else ranks have of the newest step, by file."""
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    found = {path.name: path.read_bytes() for path in newest.glob("rank-*")}
    assert found
    return found


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "why"),
    [
        # As below, from checkpoints on the machine, and in test_elastic, on fewer ranks; a rank that is stopped is
        # ended in tests/telemetry/test_watchdog.py.
        (signal.SIGKILL, r"Rank 1 was ended by SIGKILL"),
        (signal.SIGSTOP, r"Rank 1 \(host .*\) is stopped \(SIGSTOP\)\. Missing from .*\n?.*All ranks were ended\."),
    ],
)
def test_a_rank_that_is_killed_or_stopped_in_a_step_changes_no_loss_and_no_weight(
    number: signal.Signals, why: str, tmp_path: Path, undisturbed: Path
) -> None:
    """The oracle is the run that nobody has disturbed. Of a rank that is stopped the watchdog makes an end."""
    words = command(tmp_path, *STEPS, "launch.restarts=1", "launch.stall_s=1")
    done = killed_by(programs.Program(*words, env=environment()), number, behind_step=8)
    assert done.returncode == 0, done.stderr
    assert re.search(why, done.stderr), done.stderr
    assert re.search(r"(?m)^restart 1 of 1: starting 2 ranks again, from .*/step-\d+[05]$", done.stdout), done.stdout
    (restart,) = metrics(tmp_path, "restart")
    assert (restart["number"], restart["most"], restart["ranks"]) == (1, 1, 2)
    assert restart["step"] in range(5, 20, 5) and re.match(why.partition(r"\. ")[0], restart["why"])
    assert f"step {restart['step']}: restart 1 of 1" in (tmp_path / "run" / "report.html").read_text()
    assert curve(tmp_path) == curve(undisturbed)
    assert weights(tmp_path) == weights(undisturbed)
    well = {"code": 0, "reason": "done", "cause": "all steps are done", "rank": None, "step": 20}
    for folder in (tmp_path, undisturbed):  # the launcher's ranks, and those that others have started
        assert json.loads((folder / "run" / "exit.json").read_text()) == well


@pytest.mark.long
@pytest.mark.processes
def test_ranks_that_are_started_again_go_on_from_what_is_on_the_machine(tmp_path: Path, undisturbed: Path) -> None:
    (shm := tmp_path / "shm").mkdir()
    local = ["checkpoint.every=null", f"checkpoint.local.folder={shm}", "checkpoint.local.every=3"]
    words = command(tmp_path, *STEPS, *local, "launch.restarts=1")
    done = killed_by(programs.Program(*words, env=environment()), signal.SIGKILL, behind_step=8)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"(?m)^restart 1 of 1: starting 2 ranks again, from {shm}/terrazzo-.*/step-\d+$", done.stdout)
    (restart,) = metrics(tmp_path, "restart")
    assert restart["step"] in (6, 9, 12, 15, 18)
    assert curve(tmp_path) == curve(undisturbed)
    assert weights(tmp_path) == weights(undisturbed)
    assert list(shm.iterdir()) == []


CRASHES = """
import os, runpy, signal, sys
from terrazzo.train.loop import TrainingLoop

step = TrainingLoop.train_step
def train_step(self):
    if self.session.step == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    step(self)

TrainingLoop.train_step = train_step
sys.argv[0] = "terrazzo"
runpy.run_module("terrazzo", run_name="__main__", alter_sys=True)
"""
"""A rank that never comes behind step 7."""


@pytest.mark.processes
def test_a_run_that_fails_at_one_step_again_and_again_is_ended(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(CRASHES)
    words = command(tmp_path, *STEPS, "launch.restarts=5", "launch.ranks=1")
    done = programs.run("-c", LAUNCHER, str(tmp_path / "rank.py"), *words[2:], env=environment())
    assert done.returncode == 1
    assert re.findall(r"restart (\d) of 5: starting 1 rank again, from .*(step-\d+)\n", done.stdout) == [
        ("1", "step-00000005")
    ]
    why = r"the failure before \(the newest is .*/step-00000005\), which was: Rank 0 was ended by SIGSEGV\.\n$"
    assert re.search(rf"\nNot started again: no checkpoint was saved since {why}", done.stderr), done.stderr
    assert [point[0] for point in curve(tmp_path)][-1] == 7
    note = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert note == {
        "code": 1,
        "reason": "killed",
        "cause": "Rank 0 was ended by SIGSEGV",
        "rank": 0,
        "step": None,
    }  # alone, it records nothing
