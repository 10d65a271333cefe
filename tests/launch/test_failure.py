"""What a rank says as it ends, whatever else fails with it: in children of this process."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from terrazzo.errors import (
    BadInput,
    CopiesDiffer,
    Corrupted,
    Damaged,
    Diverged,
    FolderLost,
    Misuse,
    SaveFailed,
    SwapChanged,
    SwapFailed,
)
from terrazzo.exit_codes import BAD_INPUT, CORRUPTED, DIVERGED, FAILED, INTERRUPTED, PREEMPTED, reason_of
from terrazzo.launch.launcher.run_end import RunEnd
from terrazzo.launch.launcher_pipe import REPORT
from terrazzo.launch.rank import failure_reporters
from terrazzo.launch.rank.rank_process import RankProcess
from terrazzo.launch.stopping import preemption
from terrazzo.launch.stopping.preemption import stays_stopped
from terrazzo.processes import tether
from terrazzo.telemetry.log.exit_note import overrule_exit
from tests.checkpoint.faults import reap, spawn_child
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody has started this process as a rank, and its children look around often."""
    for name in ("TORCHELASTIC_ERROR_FILE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "MASTER_PORT", REPORT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(failure_reporters, "WATCH_EVERY_S", 0.005)
    monkeypatch.setattr(failure_reporters, "SIBLING_GRACE_S", 0.05)
    return tmp_path


def spawn_rank(rank: int, work: Callable[[], int], claims: Path | None = None, *, asked: bool = True) -> int:
    """A process that does the work as a rank, seven steps of which are done, and whose run `claims` a folder.

    `asked` says whether it was, if it ends because it was to stop.
    """

    def claim_and_work(process: RankProcess) -> int:
        if claims is not None:
            process.note_end_in(claims, lambda: 7)
        return work()

    def body() -> None:
        tether.PARENT = os.getppid()
        process = RankProcess(rank)
        process.asked = asked
        process.run(lambda: claim_and_work(process))

    return spawn_child(body)


def explode() -> int:
    raise ZeroDivisionError("the cause of it all")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_under_slurm_a_lone_rank_says_it_each_time(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for _ in range(2):
        assert reap(spawn_rank(0, explode)) == FAILED
        assert capfd.readouterr().err.count("ZeroDivisionError: the cause") == 1
    assert os.listdir(temporary) == []


def test_a_second_run_of_a_job_step_is_not_the_first_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def hang() -> int:
        time.sleep(0.1)
        (temporary / "lived").touch()
        time.sleep(30)
        return 0

    assert [reap(spawn_rank(rank, explode)) for rank in (0, 1)] == [FAILED, FAILED]
    assert capfd.readouterr().err.count("ZeroDivisionError: the cause") == 1
    hanging = spawn_rank(0, hang)
    wait_for(temporary / "lived")  # the first run's failures have not ended it
    assert reap(spawn_rank(1, explode)) == FAILED
    assert reap(hanging, 10) == FAILED
    assert capfd.readouterr().err.count("ZeroDivisionError: the cause") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("a"), BAD_INPUT),
        (Damaged("a"), BAD_INPUT),
        (Misuse("a"), FAILED),
        (SwapFailed("a"), FAILED),
        (SwapChanged("a"), CORRUPTED),
        (CopiesDiffer("a"), CORRUPTED),
        (Diverged("a"), DIVERGED),
        (KeyboardInterrupt(), INTERRUPTED),
        (SystemExit(3), 3),
        (SystemExit(0), FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_ends_with_the_code_of_what_it_raises(
    temporary: Path, error: BaseException, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert reap(spawn_rank(0, work)) == code
    assert capfd.readouterr().err != ""


@pytest.mark.parametrize("to", ["launcher", "torchrun", "slurm"])
@pytest.mark.parametrize("mendable", [False, True])
def test_the_cause_is_said_where_reporting_it_fails(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], to: str, mendable: bool
) -> None:
    """As on a full disk: here the folders are gone, and the pipe is closed."""
    (temporary / "attempt_0" / "0").mkdir(parents=True)
    unwritable = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setenv("WORLD_SIZE", "2")
    variable, value = {
        "launcher": (REPORT, str(unwritable)),
        "torchrun": ("TORCHELASTIC_ERROR_FILE", f"{temporary}/attempt_0/0/error.json"),
        "slurm": ("SLURM_JOB_ID", "7"),
    }[to]
    monkeypatch.setenv(variable, value)

    def work() -> int:
        print("what was printed before", end="")
        for folder in temporary.iterdir():
            shutil.rmtree(folder)
        if mendable:
            raise BadInput("The value 7 is not a fruit.")
        return explode()

    assert reap(spawn_rank(0, work)) == (2 if mendable else FAILED)
    shown = capfd.readouterr()
    assert shown.err.count("not a fruit" if mendable else "ZeroDivisionError: the cause") == 1
    assert shown.err.count("Traceback") == (0 if mendable else 1)
    assert shown.out == "what was printed before"
    os.close(unwritable)


@pytest.mark.parametrize("kind", [BadInput, OSError])
def test_control_characters_of_strangers_do_not_reach_the_terminal(
    temporary: Path, capfd: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def work() -> int:
        raise kind("The tensor '\x1b[2Jx' is not there.")

    reap(spawn_rank(0, work))
    said = capfd.readouterr().err
    assert r"The tensor '\x1b[2Jx' is not there." in said
    assert "\x1b" not in said


@pytest.mark.parametrize("kind", [SaveFailed, OSError])
def test_a_password_in_an_error_is_not_shown(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    """Nor in what torchrun shows in the end."""
    report = temporary / "attempt_0" / "0" / "error.json"
    report.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))

    def work() -> int:
        raise kind("The checkpoint 's3://key:sec/ret@host/run' was not saved.")

    assert reap(spawn_rank(0, work)) == FAILED
    said, written = capfd.readouterr().err, report.read_text()
    for text in (said, json.loads(written)["message"]["message"]):
        assert "The checkpoint 's3://***@host/run' was not saved." in text
    assert "ret@host" not in said + written
    assert ("py_callstack" in written) is (kind is OSError)


@pytest.mark.parametrize(
    ("kind", "lasts"),
    [
        *((kind, True) for kind in (BadInput, Misuse, Diverged, Corrupted, FolderLost, KeyboardInterrupt)),
        *((kind, False) for kind in (SaveFailed, ConnectionError, MemoryError)),
    ],
)
def test_the_launcher_hears_whether_a_new_start_may_mend_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], lasts: bool
) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setenv(REPORT, str(theirs))

    def work() -> int:
        raise kind("what was wrong")

    reap(spawn_rank(0, work))
    os.close(theirs)
    with os.fdopen(ours) as said:
        assert json.loads(said.read())["failure"]["lasts"] is lasts


@pytest.fixture
def attempts(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have this process be a rank of torchrun's attempt of a number."""

    def begin(number: int) -> None:
        folder = temporary / "agent" / f"attempt_{number}" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))

    begin(0)
    return begin


def ranks_stay_stopped() -> bool:
    """What two ranks hear, which must be the same."""
    one, other = run_in_threads(2, lambda rank: stays_stopped())
    assert one is other
    return one


def test_a_run_that_was_asked_to_stop_stays_stopped_when_torchrun_starts_its_ranks_again(
    attempts: Callable[[int], None],
) -> None:
    assert not ranks_stay_stopped()
    assert reap(spawn_rank(0, lambda: PREEMPTED)) == PREEMPTED
    for number in (1, 2, 2):
        attempts(number)
        assert ranks_stay_stopped()


def test_ranks_that_have_failed_and_those_of_other_machines_that_come_go_on(attempts: Callable[[int], None]) -> None:
    """An agent that was told of further machines asks its ranks to stop, and does not count that as a restart."""
    assert reap(spawn_rank(0, explode)) == FAILED
    attempts(1)
    assert not ranks_stay_stopped()
    assert reap(spawn_rank(0, lambda: PREEMPTED)) == PREEMPTED
    assert not ranks_stay_stopped()
    attempts(2)  # a failure, after they have gone on
    assert not ranks_stay_stopped()


def test_ranks_of_a_machine_that_nobody_has_asked_to_stop_go_on(attempts: Callable[[int], None]) -> None:
    """They have stopped because those of another were asked, as it is taken away."""
    assert reap(spawn_rank(0, lambda: PREEMPTED, asked=False)) == PREEMPTED
    attempts(1)
    assert not ranks_stay_stopped()
    assert reap(spawn_rank(0, lambda: PREEMPTED)) == PREEMPTED
    assert reap(spawn_rank(1, lambda: PREEMPTED, asked=False)) == PREEMPTED
    attempts(2)
    assert ranks_stay_stopped(), "one of its ranks was asked"


def test_ranks_go_on_together_or_not_at_all(attempts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on the machine of the second one a note was left."""
    assert reap(spawn_rank(0, lambda: PREEMPTED)) == PREEMPTED
    attempts(1)
    real = preemption._attempt
    monkeypatch.setattr(preemption, "_attempt", lambda: real() if dist.get_rank() == 1 else None)
    assert ranks_stay_stopped()


# -- how it ends, for those who hear another code -------------------------------------------------------------------


def note_in(folder: Path) -> dict[str, Any] | None:
    note = folder / "exit.json"
    return json.loads(note.read_text()) if note.exists() else None


def test_the_first_failure_is_noted_in_the_runs_own_folder(attempts: Callable[[int], None], tmp_path: Path) -> None:
    """Torchrun ends with 1, whatever its ranks have ended with."""

    def diverge() -> int:
        raise Diverged("The loss is nan in step 8.\nLower optimizer.lr.")

    def follow() -> int:
        raise ConnectionError("rank 1 has closed its connection")

    assert reap(spawn_rank(1, diverge, tmp_path)) == DIVERGED
    assert reap(spawn_rank(0, follow, tmp_path)) == FAILED
    cause = "Error: The loss is nan in step 8.\nLower optimizer.lr."
    assert note_in(tmp_path) == {"code": DIVERGED, "reason": "diverged", "cause": cause, "rank": 1, "step": 7}


def test_a_rank_that_nobody_has_started_notes_its_own_interruption(tmp_path: Path) -> None:
    def body() -> None:
        process = RankProcess(0)
        process.note_end_in(tmp_path, lambda: 7)
        process.note_interrupted()
        os._exit(INTERRUPTED)

    assert reap(spawn_child(body)) == INTERRUPTED
    cause = "ended at once by a second Ctrl-C, with nothing saved"
    assert note_in(tmp_path) == {"code": 130, "reason": "interrupted", "cause": cause, "rank": None, "step": 7}


def test_a_path_that_is_no_utf_8_is_noted_and_said(
    temporary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python has such bytes of a file's name as half a character, which no file in UTF-8 can hold."""

    def refuse() -> int:
        raise BadInput("'caf\udce9.jsonl' is cut short.")

    assert reap(spawn_rank(0, refuse, tmp_path)) == BAD_INPUT
    assert "is cut short" in capfd.readouterr().err
    note = note_in(tmp_path)
    assert note is not None and note["cause"] == r"Error: 'caf\udce9.jsonl' is cut short."


def test_a_folder_that_is_not_the_runs_own_has_no_note(attempts: Callable[[int], None], tmp_path: Path) -> None:
    def refused() -> int:
        raise BadInput("Another run saves there.")

    assert reap(spawn_rank(0, refused)) == BAD_INPUT
    assert note_in(tmp_path) is None


@pytest.mark.parametrize(("code", "cause"), [(0, "all steps are done"), (PREEMPTED, "asked to stop, and saved")])
def test_a_run_that_went_well_is_noted_by_its_first_rank(
    code: int, cause: str, attempts: Callable[[int], None], tmp_path: Path
) -> None:
    assert reap(spawn_rank(1, lambda: code, tmp_path)) == code
    assert note_in(tmp_path) is None
    assert reap(spawn_rank(0, lambda: code, tmp_path)) == code
    assert note_in(tmp_path) == {"code": code, "reason": reason_of(code), "cause": cause, "rank": None, "step": 7}


@pytest.mark.parametrize(
    ("there", "ended", "noted"),
    [
        (
            {"code": 1, "reason": "failed", "cause": "ConnectionError: gone", "rank": 0, "step": 3},
            RunEnd(1, "Rank 1 was ended by SIGKILL", lasts=False, rank=1, step=4, reason="killed"),
            {"code": 1, "reason": "killed", "cause": "Rank 1 was ended by SIGKILL", "rank": 1, "step": 4},
        ),
        (
            {"code": 83, "reason": "diverged", "cause": "Error: nan", "rank": 1, "step": 3},
            RunEnd(83, "rank 1 failed: Error: nan", rank=1),
            {"code": 83, "reason": "diverged", "cause": "Error: nan", "rank": 1, "step": 3},
        ),
        (
            None,
            RunEnd(130, "ended by SIGINT"),
            {"code": 130, "reason": "interrupted", "cause": "ended by SIGINT", "rank": None, "step": None},
        ),
        (None, RunEnd(0), {"code": 0, "reason": "done", "cause": "all steps are done", "rank": None, "step": None}),
        (
            None,
            RunEnd(255),  # 127 more than 128, and no signal
            {"code": 255, "reason": "failed", "cause": "ended with exit code 255", "rank": None, "step": None},
        ),
    ],
)
def test_a_launcher_knows_of_ranks_that_say_nothing(
    there: dict[str, Any] | None, ended: RunEnd, noted: dict[str, Any], tmp_path: Path
) -> None:
    if there is not None:
        (tmp_path / "exit.json").write_text(json.dumps(there))
    overrule_exit(tmp_path, ended.note)
    assert note_in(tmp_path) == noted
