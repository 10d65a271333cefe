"""Background saves of which the run, or a process that writes, dies or fails at any call."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terrazzo import checkpoint
from terrazzo.checkpoint import step_path
from terrazzo.checkpoint.saving import background as saver_module
from terrazzo.checkpoint.saving import writer_main, writer_process
from terrazzo.checkpoint.storage.local import LocalDraft
from terrazzo.errors import SaveFailed
from terrazzo.processes.tether import tie
from tests.checkpoint import faults
from tests.checkpoint.faults import Tap, calls_of, hidden, sampled
from tests.checkpoint.subject import Witness, build, fast_folder, put, save
from tests.helpers import programs
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.alone

SLOW_S = 30.0  # what would wait for another process's death longer than that is an error


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as folder:
        yield folder


class ForkedWriter:
    """Stands for `subprocess.Popen` of the process that writes: a fork of this one, in milliseconds, with a fault."""

    def __init__(self, root: Path, fault: faults.Fault, command: list[str]) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        staging = int(command[-2])
        passed = os.dup(staging)  # as pass_fds does: a fork closes what its parent's Saver has

        def work() -> None:
            os.dup2(passed, staging)
            os.close(ours_out)
            os.close(ours_in)
            sys.stdin, sys.stdout = os.fdopen(theirs_in), os.fdopen(theirs_out, "w")
            tie(int(command[command.index("-m") - 1]))
            with Tap(root, fault):
                writer_main.main(int(command[-2]), float(command[-1]))

        self.pid = faults.spawn_child(work)
        os.close(passed)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb", 0)

    def poll(self) -> int | None:
        with self._reaping:  # one thread may wait while another looks
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or SLOW_S)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("writer", timeout or SLOW_S)
            time.sleep(0.0005)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    terminate = kill


@pytest.fixture
def forked(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[faults.Fault], None]:
    """`forked(fault)`: the processes that write are forks now, and what they do meets `fault`."""

    def use(fault: faults.Fault) -> None:
        popen = lambda command, **_: ForkedWriter(root, fault, command)  # noqa: E731
        stub = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(writer_process, "subprocess", stub)

    return use


Forked = Callable[[faults.Fault], None]


def calls_of_writer(root: Path) -> list[faults.Call]:
    """What the process that writes does for a save: the part of a save between `begin` and the release of the lock."""
    model, optimizer = build(2)
    calls = calls_of(root, lambda: checkpoint.save(step_path(root, 2), model, optimizer, {"step": 2}))
    first = next(call.number for call in calls if call.name == "posix_fallocate") - 1
    last = max(call.number for call in calls if call.name == "fsync") + 1
    return calls[first : last + 1]


def in_background(root: Path) -> bool:
    """A save of step 2 by a `Saver` of its own; whether it says that it succeeded."""
    model, optimizer = build(2)
    try:
        with checkpoint.Saver(model, optimizer) as saver:
            saver.save(step_path(root, 2), {"step": 2})
            put(model, optimizer, 77)  # what is saved is of before
    except SaveFailed:
        return False
    return True


@pytest.mark.parametrize(
    "code",
    [None, pytest.param(errno.ENOSPC, marks=pytest.mark.long), errno.EIO],
    ids=["killed", "full", "broken"],
)
def test_the_process_that_writes_dies_or_fails_at_any_call(root: Path, forked: Forked, code: int | None) -> None:
    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        save(root, 1)
        calls = calls_of_writer(root)
        witness.clear(2)
        changing = [number for number, call in enumerate(calls) if call.changes]
        renamed = max(call.number for call in calls if call.name == "rename")
        for number in sampled(changing[:-1], 3 if code is None else 2):
            forked(faults.killed_after(number) if code is None else faults.fails_at(number, code))
            said, visible = in_background(root), witness.sees() == [1, 2]
            committed = code is None and calls[number].number >= renamed  # died before it could say so
            assert visible == (said or committed), calls[number]
            witness.saves(3)
            witness.clear(2)

    run_in_threads(1, body, timeout_s=faults.PATIENCE_S)


def test_the_run_is_killed_at_any_call_of_its_own(root: Path, forked: Forked) -> None:
    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        save(root, 1)
        forked(faults.harmless)
        calls = calls_of(root, lambda: in_background(root))
        witness.clear(2)
        for number in sampled(range(-1, len(calls)), 3):
            ended, held_by_all = os.pipe()

            def dying(number: int = number) -> None:
                with Tap(root, faults.killed_after(number)):
                    in_background(root)

            assert_killed(faults.spawn_child(dying))
            os.close(held_by_all)
            assert os.read(ended, 1) == b""  # its writer is gone too
            os.close(ended)
            assert witness.sees() in ([1], [1, 2])
            witness.saves(3)
            witness.clear(2)

    run_in_threads(1, body, timeout_s=faults.PATIENCE_S)


def assert_killed(child: int) -> None:
    assert faults.reap(child) == -signal.SIGKILL


def test_a_saver_goes_on_after_its_writer_was_killed(root: Path, forked: Forked) -> None:
    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        model, optimizer = build(1)
        forked(faults.killed_after(5))
        saver = checkpoint.Saver(model, optimizer)
        saver.save(step_path(root, 2), {"step": 2})
        with pytest.raises(SaveFailed, match="killed by signal 9"):
            saver.wait()
        forked(faults.harmless)
        saver.save(step_path(root, 1), {"step": 1})
        saver.close()
        assert witness.sees() == [1]
        assert hidden(root) == []

    run_in_threads(1, body)


def test_an_error_of_the_run_with_a_save_under_way_leaves_no_lock_held(root: Path, forked: Forked) -> None:
    def body(rank: int) -> None:
        forked(faults.harmless)
        witness = Witness(root, range(1, 4))
        with suppress(ZeroDivisionError), checkpoint.Saver(witness.model, witness.optimizer) as saver:
            saver.save(step_path(root, 2), {"step": 2})
            raise ZeroDivisionError
        assert checkpoint.complete_checkpoints(root) in ([], [step_path(root, 2)])
        witness.saves(3)

    run_in_threads(1, body)


def test_a_background_save_that_cannot_begin_leaves_no_lock_held(root: Path, forked: Forked) -> None:
    def body(rank: int) -> None:
        forked(faults.harmless)
        witness = Witness(root, range(1, 4))
        own = calls_of(root, lambda: in_background(root))
        witness.clear(2)
        for call in own:
            with Tap(root, faults.fails_at(call.number, errno.EIO)):
                said = in_background(root)
            assert witness.sees() == ([2] if said else []), call
            witness.saves(3)
            witness.clear(2)

    run_in_threads(1, body)


def run_of_two(root: Path, forked: Forked, rank: int, store: Path, faulty: faults.Fault, acts: Acts) -> None:
    """One of two gloo ranks that begin a background save and then do as `acts` says."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2,
                            timeout=timedelta(seconds=20))  # fmt: skip
    torch.set_num_threads(1)
    model, optimizer = build(2)
    forked(faulty if rank == 1 else faults.harmless)
    with checkpoint.Saver(model, optimizer) as saver:
        saver.save(step_path(root, 2), {"step": 2})
        acts(rank, saver)


Acts = Callable[[int, checkpoint.Saver], Any]


def ends_of_two(root: Path, forked: Forked, faulty: faults.Fault, acts: Acts) -> list[int]:
    """How the ranks ended, within `SLOW_S`."""
    store = root / f"store-{os.urandom(4).hex()}"
    began = time.monotonic()
    children = [
        faults.spawn_child(lambda rank=rank: run_of_two(root, forked, rank, store, faulty, acts))  # type: ignore[misc]
        for rank in range(2)
    ]
    ends = [faults.reap(child, SLOW_S) for child in children]
    assert time.monotonic() - began < SLOW_S
    return ends


def hears_of_it(rank: int, saver: checkpoint.Saver) -> None:
    """A failure is known on every rank before anyone waits."""
    while not saver.failed():
        time.sleep(0.01)
    dist.barrier()
    says_failed(rank, saver)


def says_failed(rank: int, saver: checkpoint.Saver) -> None:
    with pytest.raises(SaveFailed, match=r"rank 1|killed by signal 9"):
        saver.wait()


def gives_up(rank: int, saver: checkpoint.Saver, folder: Path, forked: Forked) -> None:
    """Of a save whose second rank's writer stands still, each rank says the same; the next save is as ever."""
    patience_s, saver._patience_s = saver._patience_s, 1.0
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"the part of rank 1, made no progress for 1 s.*launch\.timeout_s") as failed:
        saver.wait()
    assert time.monotonic() - began < 100
    assert str(folder / "step-00000002") in str(failed.value)
    assert checkpoint.complete_checkpoints(folder) == [step_path(folder, 1)]
    saver._patience_s = patience_s
    forked(faults.harmless)
    saver.save(step_path(folder, 2), {"step": 2})
    saver.wait()


@pytest.mark.parametrize("number", mostly_long([-1, 3], 3))
def test_one_of_two_writers_stands_still(root: Path, forked: Forked, number: int) -> None:
    run_in_threads(2, lambda rank: save(root, 1))
    stopped = faults.killed_after(number, signal.SIGSTOP)
    assert ends_of_two(root, forked, stopped, lambda rank, saver: gives_up(rank, saver, root, forked)) == [0, 0]
    assert run_in_threads(2, lambda rank: Witness(root, range(1, 4)).sees()) == [[1, 2]] * 2
    assert hidden(root) == []


def stops_at_the_end(call: faults.Call, real: faults.Real) -> Any:
    done = real()
    if call.name == "rename" and call.target.endswith("step-00000002"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return done


def test_a_writer_that_stands_still_after_the_commit_has_saved(root: Path, forked: Forked) -> None:
    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        forked(stops_at_the_end)
        model, optimizer = build(2)
        saver = checkpoint.Saver(model, optimizer, patience_s=1.0)
        saver.save(step_path(root, 2), {"step": 2})
        saver.close()
        assert witness.sees() == [2]

    run_in_threads(1, body)


def test_a_file_system_that_does_not_answer(root: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    for module in (saver_module, writer_process):
        monkeypatch.setattr(module, "BRIEF_S", 0.2)
    abandon = LocalDraft.abandon
    monkeypatch.setattr(LocalDraft, "abandon", lambda draft: (answers.wait(), abandon(draft)))

    def body(rank: int) -> None:
        witness = Witness(root, range(1, 4))
        save(root, 1)
        forked(faults.paused_after({3}, lambda: time.sleep(SLOW_S)))
        model, optimizer = build(3)
        saver = checkpoint.Saver(model, optimizer, patience_s=1.0)
        saver.save(step_path(root, 2), {"step": 2})
        with pytest.raises(SaveFailed, match="no progress for 1 s"):
            saver.wait()
        saver._patience_s = SLOW_S
        forked(faults.harmless)
        for _ in range(2):
            with pytest.raises(SaveFailed, match=r"still waiting for the file system.*another checkpoint folder"):
                saver.save(step_path(root, 3), {"step": 3})
        answers.set()
        for thread in threading.enumerate():
            if thread.name == "terrazzo-saver":
                thread.join(SLOW_S)
        saver.save(step_path(root, 3), {"step": 3})
        saver.close()
        assert witness.sees() == [1, 3]
        assert hidden(root) == []

    run_in_threads(1, body)


class HeldWriter(ForkedWriter):
    """As one in a system call that no signal interrupts."""

    def __init__(self, root: Path, command: list[str]) -> None:
        super().__init__(root, faults.paused_after({3}, lambda: time.sleep(SLOW_S)), command)

    def kill(self) -> None:
        pass

    terminate = kill

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return super().wait()
        time.sleep(timeout)
        raise subprocess.TimeoutExpired("writer", timeout)


@pytest.mark.parametrize("ends", ["close", "leave", "_at_exit"])
def test_a_writer_that_cannot_be_killed_holds_up_no_end(root: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    writers = []

    def popen(command: list[str], **_: Any) -> HeldWriter:
        writers.append(HeldWriter(root, command))
        return writers[-1]

    stub = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(writer_process, "subprocess", stub)
    for module in (saver_module, writer_process):
        monkeypatch.setattr(module, "BRIEF_S", 0.1)
    monkeypatch.setattr(saver_module, "_GRACE_S", 0.2)

    def body(rank: int) -> None:
        model, optimizer = build(2)
        saver = checkpoint.Saver(model, optimizer, patience_s=0.5)
        saver.save(step_path(root, 2), {"step": 2})
        began = time.monotonic()
        with nullcontext() if ends == "leave" else pytest.raises(SaveFailed, match="no progress"):
            getattr(saver, ends)()
        assert time.monotonic() - began < SLOW_S / 3
        saver.close()  # it has ended
        assert checkpoint.complete_checkpoints(root) == []

    try:
        run_in_threads(1, body)
    finally:
        for one in writers:
            with suppress(ProcessLookupError):  # on a slow machine it may have come to its end
                os.kill(one.pid, signal.SIGKILL)
            for thread in threading.enumerate():
                if thread.name == "terrazzo-saver":  # it has the pipes, and waits for the process
                    thread.join(SLOW_S)
            one.stdin.close()
            one.stdout.close()


def dies_alone(rank: int, saver: checkpoint.Saver) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # fails, and ends the `with` with that error


@pytest.mark.parametrize("code", mostly_long([None, errno.ENOSPC], None), ids=["killed", "full"])
def test_one_of_two_writers_dies_or_fails(root: Path, forked: Forked, code: int | None) -> None:
    run_in_threads(2, lambda rank: save(root, 1))
    points = (0, 2, 9) if code else (-1, 3, 30)
    for number in points if faults.DENSITY > 1 else points[::2]:
        faulty = faults.fails_at(number, code) if code else faults.killed_after(number)
        assert ends_of_two(root, forked, faulty, hears_of_it if code else says_failed) == [0, 0]
        run_in_threads(2, lambda rank: only_the_first_is_seen(root))


def test_one_of_two_runs_dies_with_a_save_under_way(
    root: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_threads(2, lambda rank: save(root, 1))
    monkeypatch.setattr(saver_module, "_GRACE_S", 0.5)
    writers_wait = faults.paused_after({3}, lambda: time.sleep(SLOW_S))
    assert ends_of_two(root, forked, writers_wait, dies_alone) == [1, -signal.SIGKILL]
    run_in_threads(2, lambda rank: only_the_first_is_seen(root))


def only_the_first_is_seen(root: Path) -> None:
    """And the next save leaves nothing behind."""
    witness = Witness(root, range(1, 4))
    assert witness.sees() == [1]
    witness.saves(3)


def test_two_savers_in_one_folder_at_once(root: Path, forked: Forked) -> None:
    """As many saves of each as there are, and each sweeps while the other writes."""
    forked(faults.harmless)

    def run(first: int) -> None:
        model, optimizer = build()
        with checkpoint.Saver(model, optimizer, run=str(first)) as saver:
            for step in range(first, 24, 2):
                put(model, optimizer, step)
                saver.save(step_path(root, step), {"step": step})

    def body(rank: int) -> None:
        children = [faults.spawn_child(lambda first=first: run(first)) for first in range(2)]  # type: ignore[misc]
        assert [faults.reap(child, 60) for child in children] == [0, 0]
        witness = Witness(root, range(25))
        assert witness.sees() == list(range(24))
        assert hidden(root) == []
        assert len(checkpoint.prune(root, keep_last=1, run="0")) == 11
        assert witness.sees() == [*range(1, 22, 2), 22, 23]

    run_in_threads(1, body)


PROGRAM = """
import itertools, sys
import torch.distributed as dist
from terrazzo import checkpoint
from tests.checkpoint.subject import build, put
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer = build()
with checkpoint.Saver(model, optimizer) as saver:
    print("ready", flush=True)
    for step in itertools.count(int(sys.argv[2])):
        put(model, optimizer, step)
        saver.save(checkpoint.step_path(sys.argv[1], step), {"step": step})
"""


@pytest.mark.processes
def test_real_programs_are_killed_while_they_save(root: Path) -> None:
    for kill, step in zip(range(faults.DENSITY), itertools.count(1, 10**6)):
        newest = checkpoint.latest(root)
        program = programs.Program("-c", PROGRAM, str(root), str(step))
        assert program.stdout.readline() == "ready\n"
        while checkpoint.latest(root) in (None, newest):
            time.sleep(0.01)
        time.sleep(0.05 + kill % 7 * 0.0137)
        program.send_signal(signal.SIGKILL)
        assert program.wait(120) == -signal.SIGKILL
        program.close()
        run_in_threads(1, lambda rank: all_are_whole(root))


def all_are_whole(root: Path) -> None:
    witness = Witness(root, range(0))
    paths = checkpoint.complete_checkpoints(root)
    assert paths
    for path in paths[-5:]:
        witness.expects(int(path[-8:]))
        witness.loads(int(path[-8:]))
    witness.expects(999_999)
    witness.saves(999_999)
