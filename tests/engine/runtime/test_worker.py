"""Threads that do a rank's errands: order, errors, and how they end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from terrazzo.engine.runtime.worker import Worker
from terrazzo.errors import Misuse
from tests.helpers import programs


def test_a_worker_does_jobs_in_order_and_hands_over_errors() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    worker = Worker("test")
    jobs = [worker.submit(lambda n=n: done.append(n)) for n in range(5)]
    failing, last = worker.submit(fail), worker.submit(lambda: done.append(5))
    with pytest.raises(ValueError, match="no"):
        failing.wait()
    last.wait()
    assert done == list(range(6))
    assert all(job.done() for job in jobs)


def test_a_closed_worker_has_done_its_jobs_and_takes_none() -> None:
    done: list[int] = []
    worker = Worker("test", threads=2)
    for number in range(5):
        worker.submit(lambda number=number: done.append(number))
    worker.close()
    assert sorted(done) == list(range(5))
    with pytest.raises(Misuse, match=r"closed: give it before close\(\)"):
        worker.submit(done.clear)
    worker.close()


def test_a_job_that_is_done_holds_no_memory() -> None:
    worker, held = Worker("test"), torch.zeros(10)
    alive = weakref.ref(held)

    def use(tensor: torch.Tensor = held) -> None:
        tensor.add_(1)

    job = worker.submit(use)
    del use, held
    job.wait()
    assert alive() is None


def test_the_thread_ends_with_its_worker() -> None:
    worker = Worker("test of the end")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "test of the end"]
    assert thread.daemon
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


EXIT = """
import threading, time
from terrazzo.processes.ending import start_thread

class Model:
    def work(self):
        asked.wait()
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

asked = threading.Event()
start_thread("test", Model().work, asked.set)
"""
STUCK = """
import threading
from terrazzo.engine.runtime.worker import Worker
from terrazzo.errors import Misuse

came = threading.Event()
worker = Worker("test", break_off=came.set)
worker.submit(came.wait)
print("exits", flush=True)
"""


ORDER = """
import threading
from terrazzo.processes.ending import start_thread
from terrazzo.engine.runtime.worker import Worker
from terrazzo.errors import Misuse

older, asked = Worker("older", threads=8), threading.Event()

def work():
    asked.wait()
    older.submit(lambda: None).wait()
    print("done", flush=True)

start_thread("newer", work, asked.set)
"""


def test_exit_ends_a_thread_before_those_that_it_waits_for() -> None:
    """As an update does that still reads from drives."""
    ended = programs.run("-c", ORDER)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_exit_waits_until_a_thread_has_freed_what_it_held() -> None:
    """The last reference to a parameter, dropped while the interpreter ends, would abort the process."""
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "freed\n"), ended.stderr


def test_exit_does_not_wait_long_for_a_thread_that_waits_for_another_rank() -> None:
    ended = programs.run("-c", STUCK, timeout_s=60)
    assert (ended.returncode, ended.stdout) == (0, "exits\n"), ended.stderr
