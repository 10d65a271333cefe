"""`terrazzo run`: what a script finds, what is said when it fails, and who has started its ranks."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.errors import BadInput
from terrazzo.launch.launcher import start_ranks as launcher
from terrazzo.launch.launcher.labelled_output import LabelledOutput, OutputTarget
from terrazzo.launch.launcher.local_ranks import LaunchSpec
from terrazzo.launch.launcher.run_end import RanksAtEnd, report_end
from terrazzo.launch.launcher_pipe import REPORT, Failure, Milestone
from terrazzo.launch.script import start_script as launching
from tests.helpers import programs
from tests.launch.test_launch import Ended, S

STARTED = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
]


ASKED = "Stopping: waiting for all 2 ranks of the script to end. Ctrl-C once more ends them at once."


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STARTED:
        monkeypatch.setenv(name, "")  # registers the name, so that what is set later is undone
        monkeypatch.delenv(name)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been started, in place of starting it."""
    calls: list[Any] = []

    def note(start: LaunchSpec, **_: object) -> int:
        calls.append((start.ranks, start.words[2:]))
        return 0

    def become(_: str, words: list[str]) -> None:
        calls.append(words[1:])
        raise SystemExit(0)

    monkeypatch.setattr(launching, "launch_ranks", note)
    monkeypatch.setattr(os, "execv", become)
    return calls


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["run", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    return str(result.exception)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ranks", "words"),
    [
        (["--ranks", "2", "FILE", "--lr", "1", "--help", "--", "-m"], 2, ["FILE", "--lr", "1", "--help", "--", "-m"]),
        (["FILE", "--ranks", "2", "a", "--version"], 2, ["FILE", "a", "--version"]),
        (["FILE", "--ranks=3"], 3, ["FILE"]),
        (["--ranks", "2", "FILE", "--ranks", "7"], 2, ["FILE", "--ranks", "7"]),
        (["--ranks", "2", "-m", "a.module", "-m", "x"], 2, ["-m", "a.module", "-m", "x"]),
        (["FILE", "a"], 1, ["FILE", "a"]),
    ],
)
def test_what_stands_behind_the_script_is_the_scripts(
    given: list[str], ranks: int, words: list[str], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = run(*[__file__ if word == "FILE" else word for word in given])
    assert result.exit_code == 0, result.exception
    assert asked == [(ranks, [__file__ if word == "FILE" else word for word in words])]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere.py"], "There is no file 'nowhere.py'"),
        ([__file__, "--lr", "1", "--ranks", "2"], "--ranks stands among the arguments of"),
        ([__file__, "--ranks", "two"], "--ranks is 'two', expected a whole number above 0"),
        ([__file__, "--ranks"], "--ranks is '', expected"),
    ],
)
def test_what_cannot_be_started_is_refused_before(given: list[str], said: str, asked: list[Any]) -> None:
    assert said in refused(*given)
    assert asked == []


def test_without_a_number_there_is_a_rank_for_each_gpu(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert "4 ranks, one for each GPU here; --ranks N starts N" in run(__file__).stderr
    assert asked == [(4, [__file__])]


# -- under others --------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_TASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("environment", "starter"),
    [(TORCHRUN, "torchrun"), (SLURM, "Slurm"), (TORCHRUN | {"TORCHELASTIC_RUN_ID": "terrazzo"}, "`terrazzo run`")],
)
def test_the_script_joins_ranks_that_others_have_started_and_says_whose(
    environment: dict[str, str], starter: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert f"joins the 4 ranks that {starter} has started" in run("-m", "a.module", "x").stderr
    assert run(__file__, "--ranks", "4").exit_code == 0
    assert asked == [["-m", "a.module", "x"], [__file__]]
    assert f"--ranks is 2, but {starter} has started this process as one of WORLD_SIZE=4" in refused(
        __file__, "--ranks", 2
    )


def test_a_shell_that_slurm_has_started_is_no_rank(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    run(__file__, "--ranks", "2")
    assert asked == [(2, [__file__])]


# -- what is printed -----------------------------------------------------------------------------------------------


def test_lines_are_labelled_once_they_are_whole(capfd: pytest.CaptureFixture[str]) -> None:
    labelled = LabelledOutput("[rank 1] ", OutputTarget(1))
    for written, shown in (
        (b"one\ntw", "[rank 1] one\n"),
        (b"o\n", "[rank 1] two\n"),
        (b" 10%\r 20%", ""),
        (b"\r100%\r\nla", "[rank 1] 100%\n"),
        (b"te\n 10%\r", "[rank 1] late\n"),
        (b" 20%\r", ""),
        (b" 30%\nla", "[rank 1]  30%\n"),
    ):
        os.write(labelled.theirs, written)
        assert labelled.read()
        assert capfd.readouterr().out == shown
    labelled.close_writing_end()
    assert not labelled.read()
    labelled.close()
    assert capfd.readouterr().out == "[rank 1] la\n"


def test_lines_are_not_torn_by_what_others_write_to_the_same_pipe() -> None:
    """Writes of more than a pipe takes at once are: each that is read here was one."""
    lines = [b"%d" % number * 40 for number in range(400)]
    reader, writer = os.pipe2(os.O_DIRECT)
    labelled = LabelledOutput("r ", OutputTarget(writer))
    os.write(labelled.theirs, b"".join(line + b"\n" for line in lines))
    assert labelled.read()
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    labelled.close_writing_end()
    labelled.close()
    assert all(write.endswith(b"\n") and len(write) <= select.PIPE_BUF for write in writes)
    assert b"".join(writes) == b"".join(b"r " + line + b"\n" for line in lines)


def test_a_full_disk_is_said_once_and_ranks_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full:
        target = OutputTarget(full.fileno())
        for _ in range(2):
            labelled = LabelledOutput("[rank 1] ", target)
            os.write(labelled.theirs, b"one\n")
            assert labelled.read()
            labelled.close_writing_end()
            labelled.close()
    said = "Output of the ranks cannot be written (No space left on device), and they go on.\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_reader_who_is_behind_is_waited_for_by_the_rank_alone(is_blocking: bool) -> None:
    source, target = os.pipe()
    os.set_blocking(target, is_blocking)
    lines = b"".join(b"%d\n" % number for number in range(20_000))  # more than the pipe holds
    labelled, read = LabelledOutput("r ", OutputTarget(target)), bytearray()
    labelled.start()

    def print_all() -> None:
        left = memoryview(lines)
        while left:
            left = left[os.write(labelled.theirs, left) :]
        labelled.close_writing_end()
        labelled.finish()

    rank = threading.Thread(target=print_all)
    rank.start()
    rank.join()
    assert not labelled.is_finished(0.2)
    reader = threading.Thread(
        target=lambda: [read.extend(data) for data in iter(lambda: os.read(source, 1 << 16), b"")]
    )
    reader.start()
    assert labelled.is_finished(30)
    os.close(target)
    reader.join()
    os.close(source)
    assert bytes(read) == b"".join(b"r " + line + b"\n" for line in lines.splitlines())


FLOODS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
while True:
    sys.stdout.write("x" * 200 + "\\n")
"""


@pytest.mark.processes
@pytest.mark.parametrize("merged", [False, True], ids=["stdout", "stderr too"])
def test_signals_are_heeded_while_nobody_reads(merged: bool, tmp_path: Path) -> None:
    """Ranks that print without end into a full pipe, and what the launcher says with them, or beside them."""
    (tmp_path / "floods.py").write_text(FLOODS)
    words = ("-m", "terrazzo", "run", "--ranks", "2", str(tmp_path / "floods.py"))
    command = programs.Program(*words, merged=merged)
    try:
        _await_full(command.stdout.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            command.send_signal(number)
            time.sleep(0.5)
        assert command.wait(30) == 130
        assert merged or command.stderr.readline() == f"{ASKED}\n"
    finally:
        command.close()


FAILS = """
import os, sys, time
while os.environ["RANK"] == "0":
    sys.stdout.write("x" * 200 + "\\n")
time.sleep(2)
sys.stdout.write("y\\n" * 20_000)
raise ZeroDivisionError("the cause of it all")
"""


@pytest.mark.processes
def test_the_failure_of_a_rank_is_said_while_nobody_reads_and_its_lines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "terrazzo", "run", "--ranks", "2", str(tmp_path / "fails.py")]
    command = subprocess.Popen(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    with command, os.fdopen(reader) as lines:
        assert command.stderr is not None
        try:
            assert select.select([command.stderr], [], [], 60)[0]
            assert command.stderr.readline() == "Rank 1 failed first:\n"
            assert sum(line == "[rank 1] y\n" for line in lines) == 20_000
            assert command.wait(30) == 1
        finally:
            command.kill()


def _await_full(reader: int) -> None:
    """Wait until nothing has fitted into a pipe for a while."""
    size = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    there, deadline = array.array("i", [0]), time.monotonic() + 90
    while there[0] < size - 4096:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        fcntl.ioctl(reader, termios.FIONREAD, there)
    time.sleep(1.0)


def test_a_stop_that_was_asked_for_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = Failure(0, 100 * S, 130, "KeyboardInterrupt")
    follows = Failure(1, 101 * S, 1, "RuntimeError: Connection closed by peer")
    ranks: list[Any] = [Ended(0, -2, interrupted, 101 * S), Ended(1, 1, follows, 102 * S)]
    assert report_end(RanksAtEnd(ranks, stop_signal=signal.SIGINT)).code == 130
    assert capsys.readouterr().err == "Stopped by SIGINT; all ranks have ended.\n"
    killed: list[Any] = [Ended(0, -15, ended_ns=S), Ended(1, -15, ended_ns=S)]
    assert report_end(RanksAtEnd(killed, stop_signal=signal.SIGTERM)).code == 143
    saved: list[Any] = [Ended(0, 75), Ended(1, 75)]
    assert report_end(RanksAtEnd(saved, stop_signal=signal.SIGTERM)).code == 75
    assert capsys.readouterr().err.count("\n") == 1
    broken: list[Any] = [Ended(0, 1, Failure(0, 99 * S, 1, "OSError: disk full"), 101 * S), Ended(1, -2)]
    assert report_end(RanksAtEnd(broken, stop_signal=signal.SIGINT)).code == 1
    assert "OSError: disk full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (True, [ASKED, "Ended at once, as asked."]),
        (False, ["Ended before the script began."]),
    ],
)
def test_a_script_that_is_ended_at_once_is_said_to_be(
    begun: bool, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranks(contextlib.nullcontext[Any]):
        stall = oom_kills = None

        def __init__(self, start: LaunchSpec, *_: object, **__: object) -> None:
            self.enter_result = self
            self.ranks = [SimpleNamespace(reached={Milestone.READY} if begun else set())] * start.ranks

        def any_reached(self, milestone: Milestone) -> bool:
            return any(milestone in rank.reached for rank in self.ranks)

        def wait(self, signals: object, asked: Callable[[], None]) -> int:
            if begun:
                asked()
            return signal.SIGINT

        def await_output(self, signals: object, *, at_last: bool = False) -> None:
            pass

    monkeypatch.setattr(launcher, "LocalRanks", Ranks)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = run("--ranks", "2", __file__)
    assert result.exit_code == 130
    assert result.stderr.splitlines() == said


def test_a_rank_that_ends_without_a_word_is_named_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    ranks: list[Any] = [Ended(0, -9, ended_ns=9 * S, ended_by_us=True), Ended(1, 7, ended_ns=S)]
    assert report_end(RanksAtEnd(ranks)).code == 7
    assert capsys.readouterr().err == "Rank 1 ended with exit code 7; the other ranks were stopped.\n"


# -- a real start --------------------------------------------------------------------------------------------------

SCRIPT = """
import os, pickle, sys, time
class Mine: pass
rank = int(os.environ["RANK"])
assert "torch" not in sys.modules  # what torch reads at its import can still be set
assert "MARK" in sys.warnoptions  # options of the interpreter are those of the launcher's
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine and __name__ == "__main__"
said = sys.argv[1:], os.path.dirname(__file__) == sys.path[0], os.environ["OMP_NUM_THREADS"], os.environ["WORLD_SIZE"]
try:
    sys.stdout.write(" ".join(map(str, said)) + "\\n")  # at once, as below: lines of several ranks meet
    time.sleep(60 if sys.argv[1] == "stop" else 0)
finally:
    sys.stdout.write("cleaned up\\n" if sys.argv[1] == "stop" else "")
while rank == 0:
    time.sleep(60)
def explode():
    raise ZeroDivisionError("the cause of it all")
explode()
"""


MARK = "ignore:nothing that anybody says"


def launched(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.replace("MARK", MARK))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-W", MARK, "-m", "terrazzo", "run", "--ranks", "2", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.long
@pytest.mark.processes
def test_the_traceback_of_the_rank_that_failed_is_said_once_and_is_the_scripts_alone(tmp_path: Path) -> None:
    with launched(tmp_path, "--lr", "1", "--help") as command:
        out, err = command.communicate(timeout=100)
    said = "['--lr', '1', '--help'] True 1 2"
    assert sorted(out.splitlines()) == sorted([said, f"[rank 1] {said}"])
    assert command.returncode == 1
    first, *trace, last, _, sentence = err.splitlines()
    assert (first, trace[0]) == ("Rank 1 failed first:", "Traceback (most recent call last):")
    assert last == "ZeroDivisionError: the cause of it all"
    assert sentence == f"Rank 1 failed first: {last}"
    assert {line.split('"')[1] for line in trace if line.startswith("  File")} == {str(tmp_path / "mine.py")}


def test_a_line_of_the_first_rank_is_one_write_also_where_python_is_unbuffered(tmp_path: Path) -> None:
    """Its end written apart would let another rank's line in between."""
    script = tmp_path / "mine.py"
    script.write_text("print('one line')\nprint('tw', end='', flush=True)\nprint('o')\n")
    reader, writer = os.pipe2(os.O_DIRECT)  # each read gives one write
    told, tell = os.pipe()
    environment = {**os.environ, "RANK": "0", "PYTHONUNBUFFERED": "1", REPORT: str(tell)}
    command = [sys.executable, "-m", "terrazzo.launch.script.script_rank", str(script)]
    done = subprocess.run(command, stdout=writer, env=environment, pass_fds=[tell], timeout=60, check=False)
    written = [os.read(reader, 100) for _ in range(3)]
    for end in (reader, writer, told, tell):
        os.close(end)
    assert done.returncode == 0
    assert written == [b"one line\n", b"tw", b"o\n"]


def test_the_traceback_of_a_mistake_ends_where_the_script_calls_this_package(tmp_path: Path) -> None:
    """The message says what to change; a frame of the package would say nothing of it."""
    script = tmp_path / "mine.py"
    script.write_text("from terrazzo.words import tier_shares\ndef asks():\n    tier_shares('moon')\nasks()\n")
    told, tell = os.pipe()
    command = [sys.executable, "-m", "terrazzo.launch.script.script_rank", str(script)]
    environment = {**os.environ, "RANK": "0", REPORT: str(tell)}
    subprocess.run(command, env=environment, pass_fds=[tell], timeout=60, check=False)
    os.close(tell)
    with os.fdopen(told) as pipe:
        (failure,) = [line["failure"] for line in map(json.loads, pipe) if "failure" in line]
    *trace, message = failure["text"].splitlines()
    assert message.startswith("terrazzo.errors.BadInput: 'moon' names the tier 'moon'")
    frames = [line.split(", ") for line in trace if line.startswith("  File")]
    assert frames == [[f'  File "{script}"', "line 4", "in <module>"], [f'  File "{script}"', "line 3", "in asks"]]


ALONE = """
import torch, torch.distributed as dist, terrazzo as tz
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
model, _ = tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", units=[])
if dist.get_rank() == 0:
    model.state_dict()
"""


@pytest.mark.processes
def test_a_rank_that_saves_alone_is_told_so_by_one_message(tmp_path: Path) -> None:
    """The other one has ended in peace by then, and printed nothing that one could look at."""
    path = tmp_path / "mine.py"
    path.write_text(ALONE)
    done = programs.run("-m", "terrazzo", "run", "--ranks", "2", str(path))
    first, trace, frame, line, message, _, last = done.stderr.splitlines()
    assert (done.returncode, first, trace) == (
        1,
        *("Rank 0 has lost another rank:", "Traceback (most recent call last):"),
    )
    assert (frame, line) == (f'  File "{path}", line 7, in <module>', "    model.state_dict()")
    assert message.startswith("terrazzo.errors.ConnectionLost: model.state_dict() is of all ranks: call it on every")
    assert message.endswith(
        "Rank 1 has ended or failed: see what it has printed. Here it was the turn of model.state_dict()."
    )
    assert last == "Rank 1 ended before that with exit code 0, and no rank has failed by itself."


@pytest.mark.processes
def test_ctrl_c_reaches_every_rank_of_a_script(tmp_path: Path) -> None:
    with launched(tmp_path, "stop") as command:
        assert command.stdout is not None
        lines = [command.stdout.readline() for _ in range(2)]
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert len({line.partition("]")[0] for line in lines}) == 2
    assert sorted(out.splitlines()) == ["[rank 1] cleaned up", "cleaned up"]
    assert err.splitlines() == [ASKED, "Stopped by SIGINT; all ranks have ended."]
    assert command.returncode == 130
